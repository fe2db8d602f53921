"""The oracle of the conformance kit: `kvdock check file` damages what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.segments import SegmentOracle
from kvdock.testing import Oracle

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock_file.settings import FileSettings


class FileOracle(SegmentOracle, Oracle):
    """Reads and damages the slots of a file backend's segments."""

    def small(self, folder: Path) -> dict[str, object]:
        """Return the settings of a store of 4 MiB."""
        return {
            "root": str(folder),
            "free_space": 0,
            "quota": "4 MiB",
            "segment_bytes": "1 MiB",
        }


def oracle(settings: FileSettings) -> FileOracle:
    """Return the oracle of a store with these settings."""
    return FileOracle(settings.root)
