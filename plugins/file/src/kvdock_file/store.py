"""Open the store of a pool."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock import canonical
from kvdock.segments import (
    PosixIOEngine,
    SegmentStore,
    StoreLimits,
    StoreLocation,
    WriterLiveness,
)

if TYPE_CHECKING:
    from kvdock import AttachConfig, PoolSpec, Region
    from kvdock_file.settings import FileSettings


def limits_of(settings: FileSettings) -> StoreLimits:
    """Return the limits of a namespace."""
    return StoreLimits(
        quota_bytes=settings.quota,
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        free_bytes=settings.free_space,
        segment_bytes=settings.segment_bytes,
    )


_SCRATCH = "scratch"


@attrs.define(eq=False)
class Scratch:
    """A temporary root for test pages, on the file system of the real one.

    Args:
        path: The directory.
        users: Stores that are open below it.
    """

    path: Path
    users: int = 0

    @classmethod
    def beside(cls, root: Path) -> Scratch:
        """Make one in a root, or where that root would be created."""
        whole = root.absolute()
        place = next(one for one in (whole, *whole.parents) if os.access(one, os.F_OK))
        return cls(Path(tempfile.mkdtemp(prefix=".kvdock-trial-", dir=place)))

    def leave(self) -> None:
        """Remove it with its last user."""
        self.users -= 1
        if self.users <= 0:
            shutil.rmtree(self.path, ignore_errors=True)


class TrialStore(SegmentStore):
    """A store that removes its directory when it is closed."""

    scratch: Scratch | None = None

    def close(self) -> None:
        """Close the store; the last one removes the directory."""
        super().close()
        scratch, self.scratch = self.scratch, None
        if scratch:
            scratch.leave()


def _open_trial(
    place: StoreLocation, engine: PosixIOEngine, config: AttachConfig
) -> TrialStore:
    """Open a store for test pages: an engine must never find any of it."""
    settings: FileSettings = config.settings
    scratch: Scratch | None = config.shared.get(_SCRATCH)
    if scratch is None or scratch.users <= 0:
        scratch = config.shared[_SCRATCH] = Scratch.beside(settings.root)
    scratch.users += 1
    try:
        place = attrs.evolve(place, root=scratch.path)
        store = TrialStore(place, engine, limits_of(settings))
    except BaseException:
        scratch.leave()
        raise
    store.scratch = scratch
    return store


def open_store(pool: PoolSpec, region: Region, config: AttachConfig) -> SegmentStore:
    """Open the store of one pool of a namespace.

    Raises:
        KvdockError: If the root or a stored namespace record cannot be trusted.
    """
    settings: FileSettings = config.settings
    record = config.namespace_record
    place = StoreLocation(
        root=settings.root,
        namespace=config.namespace,
        pool=pool.name,
        object_bytes=region.object_bytes.tolist(),
        record=canonical(record) if record else b"",
        shared=settings.shared_root,
        liveness=WriterLiveness.LOCKS if settings.locks else WriterLiveness.TIMEOUT,
    )
    engine = PosixIOEngine(settings.threads, direct=settings.direct)
    if config.trial:
        return _open_trial(place, engine, config)
    return SegmentStore(place, engine, limits_of(settings))
