"""Sealed pages pass through memory that the client reaches."""

from __future__ import annotations

from typing import Any

import pytest
from sealed import check_round_trip

from kvdock_mooncake.server import start_owner

pytestmark = pytest.mark.mooncake


def test_sealed_pages_come_back(serve: Any) -> None:
    master = serve()
    owner = start_owner(master.address, 64 << 20)
    check_round_trip("mooncake", {"master": master.address, "segment_bytes": 0})
    owner.stop()
