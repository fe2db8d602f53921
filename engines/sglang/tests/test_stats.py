"""What the log says of a pool whose pages never come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.observers.metrics import MANY_PAGES
from kvdock_sglang.stats import Stats

if TYPE_CHECKING:
    import pytest


def test_a_pool_that_is_stored_and_found_and_never_restored_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = Stats()
    stats.watch("mamba", "set", MANY_PAGES)
    stats.watch("mamba", "exists", MANY_PAGES - 1)
    stats.watch("kv", "exists", MANY_PAGES)
    assert not caplog.records
    for _ in range(3):
        stats.watch("mamba", "exists", 1)
    (said,) = caplog.messages
    assert "of pool mamba were stored" in said
    assert "none was ever restored" in said


def test_one_page_that_was_restored_is_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = Stats()
    for what, pages in (
        ("get", 1),
        ("set", 2 * MANY_PAGES),
        ("exists", 2 * MANY_PAGES),
    ):
        stats.watch("kv", what, pages)
    assert not caplog.records


def test_where_an_observer_says_it_the_adapter_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = Stats(watches=False)
    stats.watch("kv", "set", MANY_PAGES)
    stats.watch("kv", "exists", MANY_PAGES)
    assert not caplog.records
