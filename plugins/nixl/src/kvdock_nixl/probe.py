"""Say whether the backend could work here, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import Finding, KvdockError
from kvdock_nixl.library import load
from kvdock_nixl.preconditions import why_not
from kvdock_nixl.probe_peers import probe_peers
from kvdock_segments import check_root

if TYPE_CHECKING:
    from kvdock_nixl.settings import NixlSettings


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
    return found
