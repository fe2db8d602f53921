"""The oracle of the conformance kit: `kvdock check nixl` damages what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.segments import SegmentOracle
from kvdock.testing import Oracle

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock_nixl.settings import NixlSettings


class NixlOracle(SegmentOracle, Oracle):
    """Reads and damages the slots of a nixl backend's segments."""

    def small(self, folder: Path) -> dict[str, object]:
        """Return the settings of a store of 4 MiB."""
        return {
            "root": str(folder),
            "free_space": 0,
            "quota": "4 MiB",
            "segment_bytes": "1 MiB",
        }


def oracle(settings: NixlSettings) -> NixlOracle:
    """Return the oracle of a store with these settings."""
    return NixlOracle(settings.root)
