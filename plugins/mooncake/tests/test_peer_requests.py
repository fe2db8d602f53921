"""Whole requests between two real processes, one of which fails."""

from __future__ import annotations

import pytest
from peer_requests import PeerRequests

# In the network of the other tests, as test_peers.py says.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.mooncake,
    pytest.mark.usefixtures("library"),
]


class TestMooncakeRequests(PeerRequests):
    backend = "mooncake"
