"""Whole requests between two real processes, one of which fails."""

from __future__ import annotations

import pytest
from peer_requests import PeerRequests

pytestmark = pytest.mark.slow


class TestNixlRequests(PeerRequests):
    backend = "nixl"
