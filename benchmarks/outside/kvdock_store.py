"""kvdock's file backend as a store of pages, as an engine uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock import (
    AttachConfig,
    Attachment,
    Batch,
    Dock,
    DType,
    Namespace,
    Operation,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.pools import Part

Rows = npt.NDArray[np.uint8]
BACKEND = "file"


def pool_of(page_bytes: int) -> PoolSpec:
    """Return a pool whose pages are bare bytes."""
    part = Part("kv", DType.U8, (page_bytes,))
    return PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(part,),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )


def settings_of(folder: Path, quota_bytes: int) -> dict[str, object]:
    """Return the backend's settings; only place and room differ from the defaults."""
    return {"root": str(folder), "quota": quota_bytes, "free_space": 0}


def attach(folder: Path, memory: Rows, quota_bytes: int) -> Attachment:
    """Attach the rows of a block of memory as one pool."""
    pages, page_bytes = memory.shape
    spec = pool_of(page_bytes)
    dock = Dock.load(require=[BACKEND])
    plan = dock.plan([spec], Shard(), prefer=[BACKEND])
    regions = {"kv": Region.of(spec, Shard(), [memory], pages)}
    settings = {BACKEND: settings_of(folder, quota_bytes)}
    return Attachment.open(dock, plan, Namespace(model="m"), regions, settings)


class Kvdock:
    """Everything on: checksums, deadlines, breakers, the quota.

    Args:
        folder: An empty folder.
        memory: Rows that pages are stored from and loaded to.
        quota_bytes: Where older pages make way.
    """

    def __init__(self, folder: Path, memory: Rows, quota_bytes: int) -> None:
        self._cache = attach(folder, memory, quota_bytes)

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Store pages; older ones make way within the call."""
        done = self._cache.put(keys, {"kv": np.arange(pages.start, pages.stop)})
        if done.pages != len(keys):
            raise RuntimeError(f"{len(keys) - done.pages} pages were not stored")

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Load pages and verify them."""
        done = self._cache.get(keys, {"kv": np.arange(pages.start, pages.stop)})
        return done.pages

    def look_up(self, keys: Sequence[str]) -> None:
        """Ask for pages, as an engine does before it computes and stores them."""
        self._cache.exists(keys)

    def settle(self) -> None:
        """Nothing goes on."""

    def drop(self, keys: Sequence[str]) -> None:
        """Nothing to do: the quota makes room, within `put`."""

    def close(self) -> None:
        """Release the attachment."""
        self._cache.close()


class KvdockBackend:
    """The backend's hook alone: checksums and the quota, without deadlines.

    Args:
        folder: An empty folder.
        memory: Rows that pages are stored from and loaded to.
        quota_bytes: Where older pages make way.
    """

    def __init__(self, folder: Path, memory: Rows, quota_bytes: int) -> None:
        pages, page_bytes = memory.shape
        self._memory = memory
        self._backend = Dock.load(require=[BACKEND]).backends[BACKEND]
        spec = pool_of(page_bytes)
        region = Region.of(spec, Shard(), [memory], pages)
        settings = self._backend.settings(settings_of(folder, quota_bytes))
        self._head = "be" * 32
        config = AttachConfig(settings=settings, namespace=self._head)
        self._handle: Any = self._backend.register_pool(spec, region, config)

    def _move(self, operation: Operation, keys: Sequence[str], pages: range) -> int:
        """Run a batch; return how many of its pages are OK."""
        size = self._memory.shape[1]
        numbers = np.arange(pages.start, pages.stop).reshape(-1, 1)
        sizes = np.broadcast_to(np.int64(size), numbers.shape)
        addresses = self._memory.ctypes.data + numbers * size
        batch = Batch(operation, self._names(keys), addresses, sizes)
        return int(self._backend.batch_io(self._handle, batch).ok.sum())

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._head}/{key}.kv.L0-1" for key in keys]

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Store pages; older ones make way within the call."""
        if self._move(Operation.PUT, keys, pages) != len(keys):
            raise RuntimeError("pages were not stored")

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Load pages and verify them."""
        return self._move(Operation.GET, keys, pages)

    def look_up(self, keys: Sequence[str]) -> None:
        """Ask for pages, as an engine does before it computes and stores them."""
        batch = Batch(Operation.EXISTS, self._names(keys))
        self._backend.batch_io(self._handle, batch)

    def settle(self) -> None:
        """Nothing goes on."""

    def drop(self, keys: Sequence[str]) -> None:
        """Nothing to do: the quota makes room, within `put`."""

    def close(self) -> None:
        """Release the handle."""
        self._handle.close()
