"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvdock import Block, Finding
from kvdock.errors import KvdockError
from kvdock.resilience import LateError, run_within
from kvdock_hf3fs import library
from kvdock_hf3fs.engine import UsrbioEngine
from kvdock_hf3fs.rings import Rings
from kvdock_hf3fs.settings import Mode
from kvdock_hf3fs.shared_memory import FOLDER, IOVS
from kvdock_hf3fs.store import existing, mount_of
from kvdock_segments import move_one

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvdock_hf3fs.library import Usrbio
    from kvdock_hf3fs.settings import Hf3fsSettings
    from kvdock_segments import IOEngine

_LIMIT_S = 5.0
_PAGE = 64 << 10
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
    root = [Finding(*one) for one in settings.check_root(direct=settings.direct)]
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
    return [*found, *_within_limit(lambda: _try_rings(usrbio, mount, settings))]


def _try_rings(usrbio: Usrbio, mount: str, settings: Hf3fsSettings) -> list[Finding]:
    """Register memory, and move a page out and back through rings."""
    try:
        loan = IOVS.allocate(usrbio, mount, 2 * _PAGE, block=settings.iov_block)
    except KvdockError as error:
        return [_bad(error)]
    found = []
    try:
        memory: npt.NDArray[np.uint8] = loan.buffer
        iovs = IOVS.hold([Block(memory.ctypes.data, memory.nbytes)])
        found.append(
            Finding(
                ok=True,
                what=f"3FS's daemon registered memory of {FOLDER} by a link in "
                f"{mount}/3fs-virt/iovs",
            )
        )
        rings = Rings(usrbio, mount, settings.entries, settings.rings)
        rings.join()
        engine = UsrbioEngine(
            usrbio, rings, iovs, chunk=settings.chunk, block=settings.iov_block
        )
        try:
            found.append(_round_trip(engine, memory, existing(settings.root)))
        finally:
            engine.close()
    finally:
        loan.give_back()
    return found


def _round_trip(engine: IOEngine, memory: npt.NDArray[np.uint8], root: Path) -> Finding:
    """Write a page through a ring, read it by the mount and by a ring."""
    name = f".probe-{secrets.token_hex(8)}"
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    right = np.frombuffer(secrets.token_bytes(_PAGE), np.uint8)
    memory[:_PAGE] = right
    memory[_PAGE:] = 0
    what = f"a page through rings in {root}"
    hint = (
        f"The daemon must see the same {FOLDER}: mount it into containers, and start "
        "both in one IPC namespace."
    )
    try:
        token = engine.open_file(name, folder, create=True)
        try:
            engine.preallocate(token, _PAGE)
            begun_s = time.monotonic()
            until_s = begun_s + _LIMIT_S
            errors = [move_one(engine, token, memory[:_PAGE], until_s, write=True)]
            with (root / name).open("rb", buffering=0) as file:
                through_mount = file.read(_PAGE)
            errors.append(move_one(engine, token, memory[_PAGE:], until_s, write=False))
            took_s = time.monotonic() - begun_s
        finally:
            engine.close_file(token)
    except OSError as error:
        return Finding(ok=False, what=f"{what}: {error}", hint=hint)
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(folder)
    failed = [error for error in errors if error]
    if failed:
        return Finding(ok=False, what=f"{what}: {os.strerror(failed[0])}", hint=hint)
    right_bytes = right.tobytes()
    if memory[_PAGE:].tobytes() != right_bytes or through_mount != right_bytes:
        return Finding(ok=False, what=f"{what}: other bytes came back", hint=hint)
    return Finding(
        ok=True, what=f"{what} was written and read back in {took_s * 1e3:.1f} ms"
    )


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


def _within_limit(call: Callable[[], list[Finding]]) -> list[Finding]:
    """Run a call that a dead daemon may never end."""
    try:
        what = "moving a page through rings"
        return run_within(time.monotonic() + 2 * _LIMIT_S, call, what)
    except LateError as error:
        hint = "Look at the log of 3FS's FUSE daemon, and restart it."
        return [Finding(ok=False, what=error.what, hint=hint)]
    except OSError as error:
        hint = "Look at the log of 3FS's FUSE daemon."
        return [Finding(ok=False, what=f"rings do not work: {error}", hint=hint)]


def _file_of(usrbio: Usrbio) -> str:
    return str(getattr(usrbio, "__file__", "built in"))


def _bad(error: KvdockError) -> Finding:
    return Finding(ok=False, what=error.what, hint=error.fix)
