"""The library's TransferEngine between two real processes, over TCP."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from direct_contract import DirectTransfers

pytestmark = pytest.mark.mooncake


class TestMooncakeDirect(DirectTransfers):
    backend = "mooncake"
    settings = MappingProxyType({"host": "127.0.0.1"})
