"""NIXL's UCX backend between two real processes."""

from __future__ import annotations

from types import MappingProxyType

from direct_contract import DirectTransfers


class TestNixlDirect(DirectTransfers):
    backend = "nixl"
    settings = MappingProxyType({"root": "/nowhere"})
