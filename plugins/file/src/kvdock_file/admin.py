"""`kvdock store` on a directory of segment files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock_file.settings import FileSettings
from kvdock_segments import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping


def open_store(target: str, settings: Mapping[str, object]) -> DirectoryStore | None:
    """Open a directory; None for a URL.

    Entry point `file` of the group `kvdock.stores`.
    """
    return DirectoryStore.open(target, settings, "file", FileSettings)
