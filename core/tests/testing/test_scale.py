"""More time and fewer repetitions for a slow store."""

from __future__ import annotations

import pytest

from kvdock.errors import SettingsError
from kvdock.testing.scale import Scale


def test_a_local_store_gets_what_is_usual() -> None:
    assert (Scale().seconds(3.0), Scale().count(12)) == (3.0, 12)


def test_a_slow_store_gets_more_time_and_fewer_repetitions() -> None:
    scale = Scale(10)
    assert scale.seconds(3.0) == 30.0
    assert scale.count(40) == 4
    assert scale.count(40, least=12) == 12
    assert scale.count(3, least=12) == 3


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.5, 1e9, float("nan")])
def test_a_scale_that_makes_no_sense_is_refused(factor: float) -> None:
    with pytest.raises(SettingsError, match="times as slow"):
        Scale(factor)
