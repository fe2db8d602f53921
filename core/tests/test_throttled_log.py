"""Failures that repeat are logged less often, each kind by itself."""

import pytest

from kvdock.throttled_log import ThrottledLog, at_powers_of_two, describe_error


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_kind_is_logged_at_once_and_then_every_half_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    failures = ThrottledLog(clock=clock)
    for clock.now_s in (0.0, 0.0, 29.9, 30.0, 31.0):
        failures.warning("put", "a put failed")
    failures.warning("get", "a get failed")
    assert caplog.messages == [
        "a put failed",
        "a put failed (2 more since the last line of this kind)",
        "a get failed",
    ]


def test_a_message_is_computed_only_for_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def message() -> str:
        asked.append(1)
        return "expensive"

    failures = ThrottledLog(policy=at_powers_of_two)
    for _ in range(3):
        failures.warning("full", message)
    assert len(asked) == len(caplog.messages) == 2


def test_an_error_that_cannot_be_printed_is_described_by_its_type() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(MuteError()) == "MuteError"
    assert describe_error(ValueError("wrong")) == "ValueError: wrong"
