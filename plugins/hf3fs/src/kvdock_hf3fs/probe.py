"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock_hf3fs import library
from kvdock_hf3fs.settings import Mode
from kvdock_hf3fs.store import existing, mount_of
from kvdock_segments import check_root

if TYPE_CHECKING:
    from kvdock_hf3fs.library import Usrbio
    from kvdock_hf3fs.settings import Hf3fsSettings

_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})


def findings(settings: Hf3fsSettings | None) -> list[Finding]:
    """Look at what the mode needs, then at the root."""
    if settings is None:
        return [
            Finding(
                ok=False,
                what="no root is configured for the hf3fs backend",
                hint="Give --set root=DIR below a mount of 3FS.",
            )
        ]
    root = [
        Finding(*one)
        for one in check_root(
            settings.root,
            free_bytes=settings.free_space,
            shared=settings.shared_root,
            direct=settings.direct,
        )
    ]
    if not root[0].ok:
        return root
    if settings.mode is Mode.POSIX:
        return [*_mounted(settings), *root]
    return [*_usrbio(settings), *root]


def _usrbio(settings: Hf3fsSettings) -> list[Finding]:
    try:
        usrbio = library.load()
        found = [Finding(ok=True, what=f"{library.MODULE} is {_file_of(usrbio)}")]
    except KvdockError as error:
        return [_bad(error)]
    try:
        mount = mount_of(usrbio, settings)
    except KvdockError as error:
        return [*found, _bad(error)]
    own = usrbio.extract_mount_point(str(existing(settings.root)))
    is_below = own is not None and Path(own).resolve() == Path(mount).resolve()
    found.append(
        Finding(
            ok=is_below,
            what=f"root {settings.root} is {'' if is_below else 'not '}on the 3FS "
            f"mounted at {mount}",
            hint="Name the mount point that root lies below (mount).",
        )
    )
    return found


def _mounted(settings: Hf3fsSettings) -> list[Finding]:
    """Say what mode posix does without, and what the file system must guarantee."""
    kind = _type_of(settings.root)
    lost = (
        "mode posix: bytes go through the kernel and its page cache, on the "
        "processor; no RDMA into the pools"
    )
    needs = (
        f"{kind} must make rename and O_EXCL atomic across hosts, and show a host's "
        "bytes to others after they are written; stale attributes cost hits alone"
    )
    found = [Finding(ok=True, what=lost), Finding(ok=True, what=needs)]
    if kind in _LOCAL:
        what = f"{kind} below {settings.root} is of this host: others find nothing"
        found.append(Finding(ok=True, what=what))
    return found


def _type_of(root: Path) -> str:
    """Return the type of the file system that a path lies in."""
    place = existing(root).resolve()
    best, kind = "", "this file system"
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, folder, name, *_ = line.split()
            if place.is_relative_to(folder) and len(folder) >= len(best):
                best, kind = folder, name
    return kind


def _file_of(usrbio: Usrbio) -> str:
    return str(getattr(usrbio, "__file__", "built in"))


def _bad(error: KvdockError) -> Finding:
    return Finding(ok=False, what=error.what, hint=error.fix)
