"""The oracle of the conformance kit: `kvdock check nixl` damages what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.testing import Oracle
from kvdock_segments import SegmentOracle

if TYPE_CHECKING:
    from kvdock_nixl.settings import NixlSettings


class NixlOracle(SegmentOracle, Oracle):
    """Reads and damages the slots of a nixl backend's segments."""


def oracle(settings: NixlSettings) -> NixlOracle:
    """Return the oracle of a store with these settings."""
    return NixlOracle(settings.require_root())
