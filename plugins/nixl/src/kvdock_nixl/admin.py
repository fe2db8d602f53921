"""`kvdock store` on a directory of segment files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.config import structure
from kvdock_nixl.settings import NixlSettings
from kvdock_segments import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.stores import Store


def open_store(target: str, settings: Mapping[str, object]) -> Store | None:
    """Open a directory; None for a URL.

    Entry point `nixl` of the group `kvdock.stores`. Files are read with plain
    I/O: the library is for engines.

    Raises:
        SettingsError: If a setting is unknown or of the wrong kind.
    """
    if "://" in target:
        return None
    given = {**settings, "root": target}
    found = structure(NixlSettings, given, where="backend 'nixl'")
    return DirectoryStore(found.require_root(), found.shared_root, found.limits)
