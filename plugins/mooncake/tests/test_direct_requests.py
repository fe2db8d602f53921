"""Whole requests between two real processes, one of which fails."""

from __future__ import annotations

import pytest
from direct_requests import DirectRequests

pytestmark = [pytest.mark.slow, pytest.mark.mooncake]


class TestMooncakeRequests(DirectRequests):
    backend = "mooncake"
