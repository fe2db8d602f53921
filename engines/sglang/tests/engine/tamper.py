"""Change what a store holds, from outside of the engine that wrote it."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

import kvdock_trace
from kvdock.batches import Batch, Operation
from kvdock.dock import Dock
from kvdock.hookspecs import AttachConfig
from kvdock.keys import build_keys, namespace_digest, namespace_record
from kvdock.regions import Region

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
        record = namespace_record(space, [route.pool for route in plan.routes])
        for route in plan.accepted:
            pages = [page for pool, page in stored if pool == route.pool.name]
            config = (settings.get(route.backend), record, plan.shard)
            replaced += _replace(route, pages, *config)
    return replaced


def _replace(
    route: Any, pages: list[str], given: Any, record: dict[str, object], shard: Any
) -> int:
    backend = Dock.load().backends[str(route.backend)]
    scratch = np.zeros(route.pool.page_bytes(shard), np.uint8)
    region = Region.of(route.pool, shard, [scratch], 1)
    digest = namespace_digest(record)
    config = AttachConfig(
        settings=backend.settings(given),
        namespace=digest,
        namespace_record=record,
        shard=shard,
    )
    handle = backend.register_pool(route.pool, region, config)
    suffixes = backend.key_suffix(route.pool, shard)
    memory = region.addresses([0])
    for page in pages:
        keys = build_keys(digest, [page], suffixes)
        got = backend.batch_io(handle, Batch(Operation.GET, keys, *memory))
        assert got.ok.all(), "a page that was written is not there"
        # The sign bit of every number, whatever its width.
        scratch[3::4] ^= 0x80
        backend.batch_io(handle, Batch(Operation.DELETE, keys))
        put = backend.batch_io(handle, Batch(Operation.PUT, keys, *memory))
        assert put.ok.all()
    backend.release(handle)
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
