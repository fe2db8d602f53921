"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvdock import Finding, KvdockError
from kvdock.geometry import block_of
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.library import load
from kvdock_nixl.preconditions import why_not
from kvdock_nixl.probe_direct import probe_direct
from kvdock_segments import move_one, preallocate_file

if TYPE_CHECKING:
    from kvdock_nixl.settings import NixlSettings

_PAGE_BYTES = 1 << 16
_TIME_S = 5.0


def findings(settings: NixlSettings) -> list[Finding]:
    """Look at the library, the way of moving bytes and the root."""
    try:
        library = load()
    except KvdockError as error:
        return [Finding(ok=False, what=error.what, hint=error.fix)]
    found = [Finding(ok=True, what=f"{library.distribution} {library.version}")]
    what, hint = why_not(settings.io)
    if what:
        return [*found, Finding(ok=False, what=what, hint=hint)]
    if settings.root is None:
        what = "no root is set: pages go to peers, and none are stored"
        return [*found, Finding(ok=True, what=what), probe_direct(library, settings)]
    root = settings.check_root(direct=settings.direct)
    found += [Finding(*one) for one in root]
    if all(one.ok for one in root):
        found.append(probe_direct(library, settings))
        found.append(_round_trip(settings))
    return found


def _round_trip(settings: NixlSettings) -> Finding:
    """Write a page into a file of its own, read it back, and remove the file."""
    way = f"{settings.io.value}{', past the page cache' if settings.direct else ''}"
    name = f".nixl-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        # A root that is missing is created by an engine, on the same file system.
        root = settings.require_root()
        above = (root, *root.absolute().parents)
        place = next(one for one in above if os.access(one, os.F_OK))
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            moved = _moved(settings, folder, name)
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(folder)
    except KvdockError as error:
        return Finding(ok=False, what=error.what, hint=error.fix)
    except OSError as error:
        return Finding(
            ok=False,
            what=f"no page can be written to {settings.root}: {error.strerror}",
            hint="Free some space, or use another file system.",
        )
    if moved:
        return Finding(ok=True, what=f"a page came back through NIXL ({way})")
    return Finding(
        ok=False,
        what=f"NIXL did not bring back a page that it wrote ({way})",
        hint="Use another io, or a file system of another kind.",
    )


def _moved(settings: NixlSettings, folder: int, name: str) -> bool:
    """Return whether NIXL alone wrote a page and read it back."""
    memory = np.frombuffer(mmap.mmap(-1, 2 * _PAGE_BYTES), np.uint8)
    memory[:_PAGE_BYTES] = np.frombuffer(secrets.token_bytes(_PAGE_BYTES), np.uint8)
    engine = NixlIOEngine.open(settings.io, [block_of(memory)], direct=settings.direct)
    before = MOVED.read()
    try:
        token = engine.open_file(name, folder, create=True)
        try:
            preallocate_file(token, _PAGE_BYTES)
            for write in (True, False):
                part = memory[:_PAGE_BYTES] if write else memory[_PAGE_BYTES:]
                until_s = time.monotonic() + _TIME_S
                if error := move_one(engine, token, part, until_s, write=write):
                    raise OSError(error, os.strerror(error))
        finally:
            engine.close_file(token)
    finally:
        engine.close()
    after = MOVED.read()
    if any(after[way] != before[way] for way in (Way.KERNEL_READ, Way.KERNEL_WRITE)):
        return False
    return bool((memory[:_PAGE_BYTES] == memory[_PAGE_BYTES:]).all())
