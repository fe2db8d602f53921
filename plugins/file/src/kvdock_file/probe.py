"""What `kvdock doctor` says about the file backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvdock.errors import KvdockError
from kvdock.plugin.hookspecs import Finding
from kvdock.segments.paths import open_root
from kvdock.segments.usage import bytes_by_namespace, cleanup_hint
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock_file.settings import FileSettings

_LITTLE_BYTES = 64 << 20


def examine(settings: FileSettings) -> tuple[Finding, ...]:
    """Open the root, look at its free space, try direct I/O if it is wanted."""
    try:
        root = open_root(settings.root, shared=settings.shared_root)
    except KvdockError as error:
        return (Finding(ok=False, what=error.what, hint=error.fix),)
    try:
        findings = [
            Finding(ok=True, what=f"root {settings.root} is ours alone"),
            _space(root, settings),
        ]
        if settings.direct:
            findings.append(_direct(root, settings))
    finally:
        os.close(root)
    return tuple(findings)


def _space(root: int, settings: FileSettings) -> Finding:
    status = os.fstatvfs(root)
    room = status.f_bavail * status.f_frsize - settings.free_space
    freed_by = "" if room >= _LITTLE_BYTES else _way_out(root, settings)
    return Finding(
        ok=room >= _LITTLE_BYTES,
        what=f"{format_bytes(max(0, room))} to use above the floor of "
        f"{format_bytes(settings.free_space)} that stays free",
        hint="Free some space, or lower free_space." + freed_by,
    )


def _way_out(root: int, settings: FileSettings) -> str:
    more = cleanup_hint(settings.root, bytes_by_namespace(root))
    return f" In the store, {more}." if more else ""


def _direct(root: int, settings: FileSettings) -> Finding:
    name = f".direct-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(name, flags, 0o600, dir_fd=root))
    except OSError as error:
        return Finding(
            ok=False,
            what=f"direct I/O does not work on {settings.root}: {error.strerror}",
            hint="Set direct to false, or use another file system.",
        )
    finally:
        if os.access(name, os.F_OK, dir_fd=root):
            os.unlink(name, dir_fd=root)
    return Finding(ok=True, what="direct I/O works")
