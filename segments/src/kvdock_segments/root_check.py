"""Check a store's root before anything is stored in it: for `kvdock doctor`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvdock.errors import KvdockError
from kvdock.units import format_bytes
from kvdock_segments.elsewhere import Elsewhere, Seen
from kvdock_segments.paths import (
    find_exposed_parent,
    missing_folders,
    namespaces_in,
    open_root,
)
from kvdock_segments.usage import cleanup_hint
from kvdock_segments.walk import segments

_LITTLE_BYTES = 64 << 20
_FEW_FILES = 256
_LOOK_S = 1.0
"""Seconds that reading index files may take; the command reads more, if asked to."""


class RootFinding(NamedTuple):
    """One finding; its fields are those of `kvdock.Finding`, in order."""

    ok: bool
    what: str
    hint: str = ""


def check_root(
    root: Path, *, free_bytes: int = 0, shared: bool = False, direct: bool = False
) -> tuple[RootFinding, ...]:
    """Open a root, measure its free space, and try direct I/O if it is wanted.

    A root that is missing is created and removed again: only that shows whether it can
    be. The hints name the settings `free_space` and `direct`, which backends on
    segments have in common. `free_bytes` of the file system stay free for other
    programs.
    """
    made = missing_folders(root)
    try:
        fd = open_root(root, shared=shared)
    except KvdockError as error:
        _remove(made)
        return (RootFinding(ok=False, what=error.what, hint=error.fix),)
    seen = Elsewhere(root, "", Counter()).look()
    try:
        findings = [
            _parents(root, shared=shared, missing=bool(made)),
            _space(fd, root, free_bytes, seen),
            *_files(fd, root),
            *_unused(root, seen),
            *_failed_places(fd, root),
        ]
        if direct:
            findings.append(_direct(fd, root))
    finally:
        os.close(fd)
        _remove(made)
    return tuple(findings)


def _remove(made: Sequence[Path]) -> None:
    """Remove the empty directories that only this check has made."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _parents(root: Path, *, shared: bool, missing: bool) -> RootFinding:
    """Check whether other users could replace the root."""
    exposed = None if shared else find_exposed_parent(root)
    if exposed is None and missing:
        return RootFinding(ok=True, what=f"root {root} will be created")
    if exposed is None:
        return RootFinding(ok=True, what=f"root {root} is ours alone")
    return RootFinding(
        ok=False,
        what=f"other users can replace root {root}: everyone may write {exposed}, "
        "which has no sticky bit",
        hint=f"Run chmod +t {exposed}, or choose a root elsewhere.",
    )


def _space(fd: int, root: Path, free_bytes: int, seen: Seen) -> RootFinding:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    room = free - free_bytes + seen.unused_bytes()
    freed_by = "" if room >= _LITTLE_BYTES else cleanup_hint(root, seen.nbytes)
    if freed_by:
        freed_by = f" In the store, {freed_by}."
    return RootFinding(
        ok=room >= _LITTLE_BYTES,
        what=f"{format_bytes(max(0, room))} to use: {format_bytes(free)} are free, of "
        f"which {format_bytes(free_bytes)} are left to other programs (free_space)",
        hint="Free some space, "
        + ("lower free_space, " if free_bytes else "")
        + "or choose another root."
        + freed_by,
    )


def _files(fd: int, root: Path) -> Iterator[RootFinding]:
    """Report a file system that takes few more files; some count none, and say 0."""
    status = os.fstatvfs(fd)
    if status.f_files and status.f_favail < _FEW_FILES:
        yield RootFinding(
            ok=False,
            what=f"the file system of {root} takes {status.f_favail} more files: its "
            "inodes are used up",
            hint="Delete small files there, or choose another root.",
        )


def _unused(root: Path, seen: Seen) -> Iterator[RootFinding]:
    """Say what is held of namespaces that no process has open."""
    if unused := seen.describe_unused():
        yield RootFinding(ok=True, what=f"in {root} {unused}")


def _failed_places(fd: int, root: Path) -> Iterator[RootFinding]:
    """Report places that could not be written, of what is read in a second."""
    end_s = time.monotonic() + _LOOK_S
    failed = 0
    for namespace in namespaces_in(fd):
        for segment in segments(root, namespace):
            failed += len(segment.contents.failed)
            if time.monotonic() > end_s:
                break
    if failed:
        yield RootFinding(
            ok=False,
            what=f"{failed} place{'s' if failed > 1 else ''} of {root} could not be "
            "written and are set aside",
            hint="A disk may be failing: look at the kernel's log and at its SMART "
            "values. `kvdock store verify` counts them by namespace.",
        )


def _direct(fd: int, root: Path) -> RootFinding:
    name = f".direct-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(name, flags, 0o600, dir_fd=fd))
    except OSError as error:
        return RootFinding(
            ok=False,
            what=f"direct I/O does not work on {root}: {error.strerror}",
            hint="Set direct to false, or use another file system.",
        )
    finally:
        if os.access(name, os.F_OK, dir_fd=fd):
            os.unlink(name, dir_fd=fd)
    return RootFinding(ok=True, what="direct I/O works")
