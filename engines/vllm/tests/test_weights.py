"""Calls that may replace the weights of a running engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.throttled_log import ThrottledLog
from kvdock_vllm.adapters import UNKNOWN, AdapterFiles
from kvdock_vllm.weights import HARMLESS_CALLS, watch_weights


def engine(told: list[str]) -> Any:
    """Return an engine of vLLM's shape, whose connector says what it is told."""

    class Core:
        def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
            told.append(f"call {getattr(method, '__name__', method)}")
            return args, options

        def sleep(self, level: int = 1, mode: str = "abort") -> str:
            told.append(f"sleep {level}")
            return mode

    one = SimpleNamespace(weights_may_change=lambda by: told.append(f"told of {by}"))
    for _ in range(2):
        watch_weights(Core, lambda _: [one])
    return Core()


def load_other_weights(worker: Any) -> None:
    del worker


@pytest.mark.parametrize(
    "method", ["reload_weights", "update_weights_of_ours", load_other_weights]
)
def test_connectors_are_told_before_workers_are_called(method: Any) -> None:
    told: list[str] = []
    assert engine(told).collective_rpc(method, 1, a=2) == ((1,), {"a": 2})
    name = getattr(method, "__name__", method)
    assert told == [f"told of {name}", f"call {name}"]


def test_what_is_known_to_change_no_weight_is_passed_on() -> None:
    told: list[str] = []
    core = engine(told)
    for method in HARMLESS_CALLS:
        core.collective_rpc(method)
    core.sleep()
    assert not any("told" in one for one in told)


def test_a_sleep_that_discards_the_weights_is_told() -> None:
    told: list[str] = []
    assert engine(told).sleep(2, mode="wait") == "wait"
    assert told == ["told of sleep of level 2", "sleep 2"]


def test_then_no_request_is_identified_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = AdapterFiles(ThrottledLog())
    files.begin("r", None)
    assert files.of("r") == ""
    files.stop("reload_weights")
    assert files.of("r") == files.of("another") == UNKNOWN
    assert "reload_weights may have replaced the weights" in caplog.text
