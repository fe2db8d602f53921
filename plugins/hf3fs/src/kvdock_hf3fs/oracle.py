"""The oracle of the conformance kit: `kvdock check hf3fs` damages what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.testing import Oracle
from kvdock_hf3fs.settings import Mode
from kvdock_segments import SegmentOracle

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock_hf3fs.settings import Hf3fsSettings


class Hf3fsOracle(SegmentOracle, Oracle):
    """Reads and damages the slots of segments, through the mount."""

    def __init__(self, settings: Hf3fsSettings) -> None:
        super().__init__(settings.root)
        self._settings = settings

    def small(self, folder: Path) -> dict[str, object]:
        """Return the settings of a store of 4 MiB."""
        if self._settings.mode is Mode.USRBIO:
            # Only beside the root is the file system that is asked for.
            folder = self.root.parent / f"{folder.parent.name}-{folder.name}"
        return {
            **super().small(folder),
            "mode": str(self._settings.mode),
            "mount": self._settings.mount,
            "chunk": min(self._settings.chunk, 64 << 10),
        }


def oracle(settings: Hf3fsSettings) -> Hf3fsOracle:
    """Return the oracle of a store with these settings."""
    return Hf3fsOracle(settings)
