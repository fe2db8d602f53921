"""Whole requests between two real processes, one of which fails."""

from __future__ import annotations

import pytest
from direct_requests import DirectRequests

# In the network of the other tests, as test_direct.py says.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.mooncake,
    pytest.mark.usefixtures("library"),
]


class TestMooncakeRequests(DirectRequests):
    backend = "mooncake"
