"""The oracle of the conformance kit: `kvdock check file` damages what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.testing import Oracle
from kvdock_segments import SegmentOracle

if TYPE_CHECKING:
    from kvdock_file.settings import FileSettings


class FileOracle(SegmentOracle, Oracle):
    """Reads and damages the slots of a file backend's segments."""


def oracle(settings: FileSettings) -> FileOracle:
    """Return the oracle of a store with these settings."""
    return FileOracle(settings.root)
