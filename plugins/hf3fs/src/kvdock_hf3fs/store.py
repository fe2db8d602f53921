"""Open the store of a pool, in either mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.errors import PluginError
from kvdock.geometry import AddressRanges
from kvdock_hf3fs import library
from kvdock_hf3fs.engine import UsrbioEngine
from kvdock_hf3fs.posix import MountedIOEngine
from kvdock_hf3fs.rings import Rings
from kvdock_hf3fs.settings import Mode
from kvdock_hf3fs.shared_memory import IOVS
from kvdock_segments import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock import AttachConfig, HostMemory, PoolSpec, Region
    from kvdock_hf3fs.library import Usrbio
    from kvdock_hf3fs.settings import Hf3fsSettings
    from kvdock_segments import IOEngine, SegmentStore

_RINGS = "hf3fs rings"


def mount_of(usrbio: Usrbio, settings: Hf3fsSettings) -> str:
    """Return the mount point that rings and memory belong to."""
    if settings.mount:
        return settings.mount
    found = usrbio.extract_mount_point(str(existing(settings.root)))
    if not found:
        raise PluginError(
            f"root {settings.root} is not below a mount of 3FS",
            fix="Mount it, name the mount point (mount), or set mode=posix for "
            "another file system.",
        )
    return found


def existing(root: Path) -> Path:
    """Return a root, or the folder that is there in which it will be made."""
    while not root.exists() and root != root.parent:
        root = root.parent
    return root


def allocate(nbytes: int, settings: Hf3fsSettings) -> HostMemory:
    """Make memory that rings reach."""
    usrbio = library.load()
    return IOVS.allocate(
        usrbio,
        mount_of(usrbio, settings),
        nbytes,
        block=settings.iov_block,
        limit=settings.iov_limit,
    )


def open_pool(pool: PoolSpec, region: Region, config: AttachConfig) -> SegmentStore:
    """Open the store of one pool of a namespace.

    Raises:
        KvdockError: If the root or a stored namespace record cannot be trusted, or
            memory of the pool is not in an iov.
    """
    return open_store(_engine(region, config), pool, region, config)


def _engine(region: Region, config: AttachConfig) -> IOEngine:
    settings: Hf3fsSettings = config.settings
    if settings.mode is Mode.POSIX:
        return MountedIOEngine(
            settings.threads,
            direct=settings.direct,
            chunk=settings.chunk,
            memory=AddressRanges.of((b.address, b.nbytes) for b in region.blocks),
        )
    usrbio = library.load()
    iovs = IOVS.hold(region.blocks)
    try:
        rings: Rings | None = config.shared.get(_RINGS)
        if rings is None or not rings.join():
            mount = mount_of(usrbio, settings)
            rings = Rings(usrbio, mount, settings.entries, settings.rings)
            rings.join()
            config.shared[_RINGS] = rings
    except BaseException:
        IOVS.leave(iovs)
        raise
    return UsrbioEngine(
        usrbio, rings, iovs, chunk=settings.chunk, block=settings.iov_block
    )


def installed() -> str:
    """Return why the library cannot be used, or ""."""
    try:
        library.load()
    except PluginError as error:
        return f"{error.what}. {error.fix}"
    return ""
