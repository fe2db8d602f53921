"""Stores that freeze, refuse, end or lose a half, and come back."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.plugin.manifest import Scope
from kvdock.testing.cases import contract_test, one_sample, reaching
from kvdock.testing.contract.damage import declining
from kvdock.testing.contract.limits import GRACE_S
from kvdock.testing.harness import becomes, spelled
from kvdock.testing.heartbeat import heartbeat
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.arrays import OutcomeArray
    from kvdock.testing.harness import Harness, Setup
    from kvdock.testing.oracles import Oracle

OLD, NEW, LATER = (page_hashes(8, label) for label in ("old", "new", "later"))

GIVE_S = 0.4
"""How much time a call has while its store is away."""

STILL_S = 2.0
"""How long other threads may stand still on a busy machine."""

BACK_S = 10.0
"""How long a store that is back may stay unused."""


class AwayTests:
    """A store that is away is a miss in time, and in use again when it is back."""

    @contract_test(one_sample, proves="frozen")
    def test_a_store_that_is_frozen_is_a_miss_in_time_and_comes_back(
        self, harness: Harness, oracle: Oracle | None, case: Sample
    ) -> None:
        self._taken_away(harness.rig(case.pool()), oracle, "frozen")

    @contract_test(one_sample, proves="refusing")
    def test_a_store_that_refuses_is_a_miss_in_time_and_comes_back(
        self, harness: Harness, oracle: Oracle | None, case: Sample
    ) -> None:
        self._taken_away(harness.rig(case.pool()), oracle, "refusing")

    @contract_test(one_sample, proves="stopped")
    def test_a_store_that_was_stopped_is_a_miss_in_time_and_comes_back(
        self, harness: Harness, oracle: Oracle | None, case: Sample
    ) -> None:
        self._taken_away(harness.rig(case.pool()), oracle, "stopped")

    @contract_test(one_sample, proves="halved")
    def test_a_store_that_lost_a_half_comes_back_and_lies_about_nothing(
        self, harness: Harness, oracle: Oracle | None, case: Sample
    ) -> None:
        self._taken_away(harness.rig(case.pool()), oracle, "halved")

    @contract_test(reaching("durability", Scope.HOST), proves="durability of hosts")
    def test_pages_outlive_a_restart_of_what_holds_them(
        self, harness: Harness, oracle: Oracle | None
    ) -> None:
        harness.plain().stored(OLD)
        with ExitStack() as stack, declining(oracle) as given:
            stack.enter_context(given.stopped())
        setup = harness.plain()
        assert becomes(lambda: setup.exists(OLD).all(), setup.scale.seconds(BACK_S)), (
            f"it declares durability {harness.backend.manifest.durability}, and a "
            "restart of what holds its pages has lost them"
        )
        setup.loaded(OLD)

    def _taken_away(self, setup: Setup, oracle: Oracle | None, fault: str) -> None:
        setup.stored(OLD)
        durable = setup.backend.manifest.durability >= Scope.HOST
        with ExitStack() as stack:
            with declining(oracle) as given:
                stack.enter_context(getattr(given, fault)())
            put = _in_time(setup, lambda at: setup.put(NEW, deadline_s=at))
            _in_time(setup, lambda at: setup.get(OLD, deadline_s=at))
            for operation in (Operation.EXISTS, Operation.DELETE):
                _in_time(setup, partial(_ask, setup, operation))
            taken = (put == Outcome.OK).all(axis=1)
            assert fault == "halved" or not taken.any(), (
                f"{taken.sum()} of {len(NEW)} pages are called stored while their "
                "store was away"
            )
        self._comes_back(setup, fault)
        kept = [page for page, one in zip(NEW, taken.tolist(), strict=True) if one]
        if fault in ("frozen", "refusing") or durable:
            kept += OLD
        if not setup.backend.manifest.eviction:
            lost = int((~setup.exists(kept)).sum())
            assert not lost, f"{lost} pages are gone that were called stored"
        setup.get(OLD + NEW)

    @staticmethod
    def _comes_back(setup: Setup, fault: str) -> None:
        """Store and load by the same handle, soon after the store is back."""
        seen: list[str] = []

        def used() -> bool:
            soon = time.monotonic() + setup.scale.seconds(GRACE_S)
            calls: list[Callable[..., OutcomeArray]] = [setup.put, setup.get]
            found = [_answered(partial(one, LATER, deadline_s=soon)) for one in calls]
            seen[:] = [spelled(answer) for answer in found]
            return all((answer == Outcome.OK).all() for answer in found)

        back_s = setup.scale.seconds(BACK_S)
        assert becomes(used, back_s), (
            f"a store that was {fault} is back, and {back_s:.0f} s later put and get "
            f"are answered {' and '.join(seen)}"
        )


def _ask(setup: Setup, operation: Operation, deadline_s: float) -> OutcomeArray:
    """Ask about pages, or delete them, by a deadline."""
    batch = Batch(operation, setup.keys(LATER), deadline_s=deadline_s)
    return setup.call(batch).outcomes


def _answered(call: Callable[[], OutcomeArray]) -> OutcomeArray:
    """Return an answer; whatever a plugin raises is ERROR, as in the core."""
    try:
        return call()
    except AssertionError:
        raise
    except Exception:  # noqa: BLE001 - a plugin may raise what it likes
        return np.full((len(NEW), 1), Outcome.ERROR, np.uint8)


def _in_time(setup: Setup, call: Callable[[float], OutcomeArray]) -> OutcomeArray:
    """Return the answer to a call that has little time; assert that it ends."""
    began = time.monotonic()
    with heartbeat() as beats:
        found = _answered(lambda: call(began + GIVE_S))
    took = time.monotonic() - began
    assert beats.most_s < setup.scale.seconds(STILL_S), (
        f"no other thread ran for {beats.most_s:.1f} s: a call that waits for its "
        "store holds the interpreter's lock"
    )
    assert took < GIVE_S + setup.scale.seconds(GRACE_S), (
        f"a call that had {GIVE_S} s took {took:.1f} s while its store was away"
    )
    return found
