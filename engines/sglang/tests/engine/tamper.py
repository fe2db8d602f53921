"""Change what a store holds, from outside of the engine that wrote it."""

from __future__ import annotations

import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import kvdock_trace
from kvdock import Attachment, Batch, Dock, Operation, Region

if TYPE_CHECKING:
    from pathlib import Path


def alter(trace: Path) -> int:
    """Replace every page that an engine stored, so that nothing shows it.

    Goes through the plugin as the engine does, so lengths and checksums are
    right; only the numbers are others.

    Returns:
        How many pages were replaced.
    """
    stored: dict[str, dict[str, None]] = {}
    for line in kvdock_trace.moves(trace):
        if line["what"] == "write":
            good = zip(line["hashes"], line["ok"], strict=True)
            names = stored.setdefault(line["pool"], {})
            names.update((name, None) for name, ok in good if ok)
    replaced = 0
    for kept in trace.glob("*.pickle"):
        plan, space, settings = pickle.loads(kept.read_bytes())  # noqa: S301 - written by the same tests
        scratch, regions = {}, {}
        for route in plan.accepted:
            name, count = route.pool.name, max(1, len(stored.get(route.pool.name, {})))
            nbytes = count * route.pool.page_bytes(plan.shard)
            scratch[name] = np.zeros(nbytes, np.uint8)
            regions[name] = Region.of(route.pool, plan.shard, [scratch[name]], count)
        with Attachment.open(Dock.load(), plan, space, regions, settings) as store:
            for pool, memory in scratch.items():
                replaced += _replace(store, pool, list(stored.get(pool, {})), memory)
    return replaced


def _replace(store: Attachment, pool: str, pages: list[str], memory: Any) -> int:
    until = time.monotonic() + 30
    where = np.arange(len(pages))
    assert not store[pool].get(pages, where, until).any(), "a stored page is gone"
    # The sign bit of every number, whatever its width and wherever it lies.
    memory[3::4] ^= 0x80
    attached = store[pool]
    # A store that was just asked for an object may hold on to it for a while.
    left = attached.keys(pages)
    while left:
        assert time.monotonic() < until, "the pages cannot be dropped"
        gone = Batch(Operation.DELETE, left, deadline_s=until, pool=pool)
        dropped = attached.channel.call(attached.handle, gone).ok
        left = [key for key, ok in zip(left, dropped, strict=True) if not ok]
        time.sleep(0.1 if left else 0)
    assert not store[pool].put(pages, where, until).any()
    return len(pages)


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
