"""One process of the crash trial: writes or reads pages until it is killed.

Run as `python crash_worker.py ROOT ROLE SEED DIRECT`. Whatever is read must be what
its key says; anything else is written to ROOT.wrong and ends the process.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Batch, Operation
from kvdock.geometry import block_of
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.settings import IOMethod
from kvdock_segments import SegmentSettings, SegmentStore, StoreLocation

Numbers = npt.NDArray[np.int64]

NAMESPACE = "c1" * 32
PAGE_BYTES = 8192
KEYS = 1500
QUOTA = 6 << 20
AT_ONCE = 24
_WORDS = np.arange(PAGE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def right_pages(numbers: Numbers) -> npt.NDArray[np.uint8]:
    """Return the only right bytes of pages, uint8 (n, PAGE_BYTES)."""
    words: npt.NDArray[np.uint64] = _WORDS + numbers.astype(np.uint64)[:, None]
    return words.view(np.uint8)


@attrs.frozen(eq=False)
class Shelf:
    """A store, and registered memory for a batch."""

    store: SegmentStore
    memory: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, root: Path, *, direct: bool) -> Shelf:
        mapped = mmap.mmap(-1, AT_ONCE * PAGE_BYTES)
        memory = np.frombuffer(mapped, np.uint8).reshape(AT_ONCE, PAGE_BYTES)
        io = IOMethod.AIO if direct else IOMethod.IO_URING
        engine = NixlIOEngine.open(io, [block_of(memory)], direct=direct)
        place = StoreLocation(
            root=root, namespace=NAMESPACE, pool="kv", object_bytes=(PAGE_BYTES,)
        )
        settings = SegmentSettings(root, QUOTA, free_space=0, segment_bytes=256 << 10)
        return cls(SegmentStore(place, engine, settings), memory)

    def run(self, operation: Operation, numbers: Numbers) -> npt.NDArray[np.bool_]:
        keys = [f"{NAMESPACE}/{number:032x}.kv" for number in numbers.tolist()]
        if operation is Operation.EXISTS:
            return self.store.run(Batch(operation, keys)).ok
        at = self.memory.ctypes.data + np.arange(len(numbers)) * PAGE_BYTES
        sizes = np.broadcast_to(np.int64(PAGE_BYTES), (len(numbers), 1))
        return self.store.run(Batch(operation, keys, at.reshape(-1, 1), sizes)).ok

    def put(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Store pages."""
        self.memory[: len(numbers)] = right_pages(numbers)
        return self.run(Operation.PUT, numbers)

    def request(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Store pages as engines do that look them up first."""
        self.run(Operation.EXISTS, numbers)
        return self.put(numbers)

    def check(self, numbers: Numbers) -> tuple[int, list[int]]:
        """Read pages; return how many were there, and those that are wrong."""
        self.memory[:] = 0
        ok = self.run(Operation.GET, numbers)
        right = (self.memory[: len(numbers)] == right_pages(numbers)).all(axis=1)
        return int(ok.sum()), numbers[ok & ~right].tolist()


def main(root: Path, role: str, seed: int, *, direct: bool) -> None:
    shelf = Shelf.open(root, direct=direct)
    rng = np.random.default_rng(seed)
    rounds = 0
    while True:
        if role == "write":
            shelf.put(rng.choice(KEYS, AT_ONCE, replace=False))
        _, wrong = shelf.check(rng.choice(KEYS, AT_ONCE, replace=False))
        if wrong:
            Path(f"{root}.wrong").write_text(f"{role} {seed}: {wrong}\n")
            raise SystemExit(1)
        rounds += 1
        if rounds == 3:
            print("going", flush=True)  # noqa: T201 - the trial waits for it


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), direct=sys.argv[4] == "1")
