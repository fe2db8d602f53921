"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvdock import Finding, KvdockError
from kvdock.geometry import block_of
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.library import load
from kvdock_nixl.preconditions import why_not
from kvdock_nixl.probe_peers import probe_peers
from kvdock_segments import check_root, try_engine

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
        return [*found, Finding(ok=True, what=what), probe_peers(library, settings)]
    root = check_root(
        settings.root,
        free_bytes=settings.free_space,
        shared=settings.shared_root,
        direct=settings.direct,
    )
    found += [Finding(*one) for one in root]
    if all(one.ok for one in root):
        found.append(probe_peers(library, settings))
        found.append(_round_trip(settings))
    return found


def _round_trip(settings: NixlSettings) -> Finding:
    """Write a page into a file of its own, read it back, and remove the file."""
    way = f"{settings.io.value}{', past the page cache' if settings.direct else ''}"
    before = MOVED.read()
    try:
        # Of pages of its own: O_DIRECT needs them aligned.
        memory = np.frombuffer(mmap.mmap(-1, 2 * _PAGE_BYTES), np.uint8)
        engine = NixlIOEngine.open(
            settings.io, [block_of(memory)], direct=settings.direct
        )
        try:
            pages = memory.reshape(2, _PAGE_BYTES)
            moved = try_engine(engine, settings.require_root(), pages, _TIME_S)
        finally:
            engine.close()
    except KvdockError as error:
        return Finding(ok=False, what=error.what, hint=error.fix)
    except OSError as error:
        return Finding(
            ok=False,
            what=f"no page can be written to {settings.root}: {error.strerror}",
            hint="Free some space, or use another file system.",
        )
    after = MOVED.read()
    # What the kernel moved does not show that NIXL works.
    kernel = (Way.KERNEL_READ, Way.KERNEL_WRITE)
    if moved and all(after[one] == before[one] for one in kernel):
        return Finding(ok=True, what=f"a page came back through NIXL ({way})")
    return Finding(
        ok=False,
        what=f"NIXL did not bring back a page that it wrote ({way})",
        hint="Use another io, or a file system of another kind.",
    )
