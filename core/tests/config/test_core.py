from __future__ import annotations

import math
import time
from typing import Any

import attrs
import pytest

from kvdock.batch import Operation
from kvdock.config.core import BreakerSettings, CoreSettings, Deadlines
from kvdock.config.schema import structure
from kvdock.errors import SettingsError

CALLS = [one.name for one in attrs.fields(Deadlines) if one.name != "grace"]
BOUNDED = [("deadlines", name) for name in CALLS] + [
    ("breaker", name) for name in ("backoff", "max_backoff", "probe_timeout")
]


@pytest.mark.parametrize(("group", "name"), BOUNDED)
@pytest.mark.parametrize("value", [0, "0 s", "0.5 ms", 0.0])
def test_nothing_can_be_done_in_no_time(
    group: str, name: str, value: str | float
) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be at least 1 ms, not 0"):
        structure(CoreSettings, {group: {name: value}}, where="core")


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, "inf", "nan"])
def test_no_deadline_is_endless(value: Any) -> None:
    with pytest.raises(SettingsError, match="is not a duration"):
        structure(CoreSettings, {"deadlines": {"get": value}}, where="core")
    with pytest.raises(SettingsError, match="is not a duration"):
        attrs.evolve(Deadlines(), get=value)


def test_the_bounds_hold_for_settings_made_in_code_too() -> None:
    with pytest.raises(SettingsError, match="put must be at least 1 ms"):
        Deadlines(put=0)
    with pytest.raises(SettingsError, match="probe_timeout must be at least 1 ms"):
        BreakerSettings(probe_timeout=0)


def test_a_moment_of_grace_may_be_none() -> None:
    assert Deadlines(grace=0).grace == 0


def test_one_method_turns_an_operation_into_a_deadline() -> None:
    deadlines = Deadlines()
    now = time.monotonic()
    assert deadlines.until(Operation.CLEAR) - now == pytest.approx(8, abs=0.5)
    assert deadlines.until("attach") - now == pytest.approx(120, abs=0.5)
    assert deadlines.until("close", 3.0) - now == pytest.approx(3, abs=0.5)
    assert deadlines.until("delete", factor=2) - now == pytest.approx(10, abs=0.5)
    assert deadlines.until("close", math.inf) == math.inf
    with pytest.raises(AttributeError, match="gett"):
        deadlines.until("gett")
