"""Fixtures that tests of several folders share."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets the clock of the host ahead."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr("time.time", lambda: real() + ahead[0])

    def skip(seconds: float) -> None:
        ahead[0] += seconds

    return skip
