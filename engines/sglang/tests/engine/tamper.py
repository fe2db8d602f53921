"""Change what a store holds, from outside of the engine that wrote it."""

from __future__ import annotations

import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvdock_trace
from kvdock.batches import Batch, Operation
from kvdock.dock import Dock
from kvdock.regions import Region
from kvdock.sessions import Attachment

if TYPE_CHECKING:
    from pathlib import Path


def alter(trace: Path) -> int:
    """Replace every page that an engine stored, so that nothing shows it.

    Goes through the plugin as the engine does, so lengths and checksums are
    right; only the numbers are others.

    Returns:
        How many pages were replaced.
    """
    stored = {
        (line["pool"], page)
        for line in kvdock_trace.moves(trace)
        if line["what"] == "write"
        for page, ok in zip(line["hashes"], line["ok"], strict=True)
        if ok
    }
    replaced = 0
    for kept in trace.glob("*.pickle"):
        plan, space, settings = pickle.loads(kept.read_bytes())  # noqa: S301 - written by the same tests
        pages = {
            route.pool.name: np.zeros(route.pool.page_bytes(plan.shard), np.uint8)
            for route in plan.accepted
        }
        regions = {
            route.pool.name: Region.of(
                route.pool, plan.shard, [pages[route.pool.name]], 1
            )
            for route in plan.accepted
        }
        with Attachment.open(Dock.load(), plan, space, regions, settings) as store:
            for pool, page in stored:
                if pool in pages:
                    _replace(store, pool, page, pages[pool])
                    replaced += 1
    return replaced


def _replace(store: Attachment, pool: str, page: str, scratch: Any) -> None:
    until = time.monotonic() + 30
    assert store.read(pool, [page], [0], until)[0] == 0, "a stored page is gone"
    # The sign bit of every number, whatever its width.
    scratch[3::4] ^= 0x80
    berth = store.berths[pool]
    gone = Batch(Operation.DELETE, berth.keys([page]), deadline_s=until, pool=pool)
    # A store that was just asked for an object may hold on to it for a while.
    while not berth.line.run(berth.handle, gone).result.ok.all():
        assert time.monotonic() < until, "the page cannot be dropped"
        time.sleep(0.1)
    assert store.write(pool, [page], [0], until)[0] == 0


def damage(root: Path) -> int:
    """Flip a byte in every 256 of every large file below a folder.

    Returns:
        How many bytes were flipped.
    """
    flipped = 0
    for path in root.rglob("*"):
        if not path.is_file() or path.stat().st_size < 4096:
            continue
        with path.open("r+b") as file:
            content = bytearray(file.read())
            content[100::256] = bytes(one ^ 0xFF for one in content[100::256])
            file.seek(0)
            file.write(content)
            os.fsync(file.fileno())
            flipped += len(content[100::256])
    return flipped
