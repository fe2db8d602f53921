"""Pages of a mounted file system whose memory is only in part the pool's."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock.geometry import AddressRanges
from kvdock_hf3fs.posix import MountedIOEngine
from kvdock_segments import SegmentStore, StoreLocation

NAMESPACE = hashlib.sha256(b"{}").hexdigest()
PAGE = 4096
PAGES = 6


def test_of_a_batch_that_reaches_beyond_the_memory_the_rest_moves(
    tmp_path: Path,
) -> None:
    words = np.arange(PAGES * PAGE // 2, dtype=np.uint32)
    memory = words.view(np.uint8).reshape(2 * PAGES, PAGE)
    start, inside = memory.ctypes.data, PAGES * PAGE
    ranges = AddressRanges.of([(start, inside)])
    engine = MountedIOEngine(2, direct=False, chunk=0, memory=ranges)
    place = StoreLocation(
        root=tmp_path / "s", namespace=NAMESPACE, pool="kv", object_bytes=(PAGE,)
    )
    store = SegmentStore(place, engine)
    rows = np.array([0, 2 * PAGES - 1, 1, 2])  # the second one lies beyond
    keys = [f"{NAMESPACE}/{row:032x}.kv" for row in rows.tolist()]
    sizes = np.broadcast_to(np.int64(PAGE), (len(rows), 1))

    def run(operation: Operation, which: list[int], gate: MemoryGate | None) -> object:
        at = (start + rows[which] * PAGE)[:, None]
        chosen = [keys[one] for one in which]
        return store.run(
            Batch(
                operation,
                chosen,
                at,
                sizes[: len(which)],
                time.monotonic() + 60,
                gate=gate,
            )
        ).outcomes.tolist()

    ok, refused = int(Outcome.OK), int(Outcome.REFUSED)
    assert run(Operation.PUT, [0, 1, 2, 3], None) == [ok, refused, ok, ok]
    before = memory.copy()
    for gate in (None, MemoryGate()):
        memory[rows[[0, 2, 3]]] = 0
        assert run(Operation.GET, [0, 2, 3], gate) == [ok] * 3
        assert (memory == before).all()
    # Of two keys of one page the second one is asked for beyond the memory.
    rows[1], keys[1] = 2 * PAGES - 1, keys[3]
    memory[rows[[0, 2]]] = 0
    assert run(Operation.GET, [0, 1, 2], MemoryGate()) == [ok, refused, ok]
    assert (memory == before).all()
    store.close()
