"""Loads are measured where they are made, and a load that does not pay is cut."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from shelf import Engine, Shelf, patient, until

from kvdock.batch import BatchResult, Operation, Outcome
from kvdock.pays.policy import LoadLimit, limited_by
from kvdock.resilience.breaker import BreakerState
from kvdock.wrappers.faults import Fault, FaultInjector, FaultSettings

if TYPE_CHECKING:
    import pytest

    from kvdock.batch import Batch
    from kvdock.pays.curves import LoadCurve

GET = Operation.GET


def throttled(delay_s: float, **core: Any) -> Engine:
    faults = FaultInjector(
        FaultSettings(kinds=(Fault.THROTTLE,), operations=(GET,), delay=delay_s)
    )
    calls = {"batch_pages": 2, "staging": "always", "staging_buffers": 8}
    return Engine(core=patient(calls=calls, **core), faults=faults)


def test_loads_are_measured_and_predicted() -> None:
    engine = Engine([Shelf()], core=patient())
    with engine.attachment as cache:
        names, pool = engine.store(4), cache["kv"]
        curves: dict[tuple[str, str], LoadCurve] = {}
        assert not pool.load_seconds(names, curves).any()
        for _ in range(3):
            cache.get(names, engine.where(range(4)))
        seconds = pool.load_seconds(names, curves)
        assert [one.known for one in curves.values()] == [True]
        assert len(seconds) == 5
        assert seconds[0] == 0 < seconds[4]
        assert (np.diff(seconds) >= 0).all()


def test_what_is_whole_when_a_load_is_cut_is_used_and_no_breaker_opens() -> None:
    engine = throttled(0.3, breaker={"abandoned_calls": 1})
    with engine.attachment as cache:
        names, pool = engine.store(8), cache["kv"]
        # Computing takes 0.5 s: the second batch is under way by then.
        limit = LoadLimit(np.linspace(0.5, 0.0, 9))
        with limited_by(limit):
            until_s = limit.until(time.monotonic() + 60)
            codes = pool.get(names, np.arange(8), until_s)
        assert (codes == Outcome.OK).tolist() == [True] * 2 + [False] * 6
        assert set(codes[2:].tolist()) == {int(Outcome.TIMEOUT)}
        assert pool.channel.breakers[GET].state is BreakerState.CLOSED
        until(lambda: not pool.channel.abandoned_calls)
        # Found again, by any caller.
        assert pool.exists(names).all()


def test_a_load_over_its_own_deadline_opens_the_breaker() -> None:
    """Guards the test above: without a limit such a call is a failure."""
    engine = throttled(0.3, breaker={"abandoned_calls": 1})
    with engine.attachment as cache:
        names, pool = engine.store(2), cache["kv"]
        pool.get(names, np.arange(2), time.monotonic() + 0.1)
        assert pool.channel.breakers[GET].state is BreakerState.OPEN


def test_a_backend_that_answers_at_the_limit_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Shelf()

    def late(batch: Batch) -> BatchResult | None:
        if batch.operation is not GET:
            return None
        until(lambda: time.monotonic() >= batch.deadline_s)
        return BatchResult.all(batch, Outcome.TIMEOUT)

    engine = Engine([shelf], core=patient(breaker={"failures": 1}))
    with engine.attachment as cache:
        names, pool = engine.store(2), cache["kv"]
        shelf.trouble = late
        for limit in (LoadLimit(np.array([0.05, 0.0, 0.0])), None):
            with limited_by(limit):
                pool.get(names, np.arange(2), time.monotonic() + 0.05)
            # The second load has no limit but its own deadline.
            closed = pool.channel.breakers[GET].state is BreakerState.CLOSED
            assert closed is (limit is not None)
            assert ("lost" in caplog.text) is (limit is None)


def test_a_request_does_not_wait_for_a_call_past_its_limit() -> None:
    """The grace of other deadlines would come on top of what computing takes."""
    engine = throttled(5.0, deadlines={"get": "20 s", "grace": "4 s"})
    with engine.attachment as cache:
        names, pool = engine.store(2), cache["kv"]
        limit, began_s = LoadLimit(np.linspace(0.05, 0.0, 3)), time.monotonic()
        with limited_by(limit):
            codes = pool.get(names, np.arange(2), limit.until(began_s + 20))
        assert time.monotonic() - began_s < 2
        assert set(codes.tolist()) == {int(Outcome.TIMEOUT)}
        assert engine.faults is not None
        engine.faults.release()


def test_a_load_that_is_slower_than_computing_ends_between_batches() -> None:
    engine = throttled(0.1)
    with engine.attachment as cache:
        names, pool = engine.store(8), cache["kv"]
        limit = LoadLimit(np.linspace(0.25, 0.0, 9), share=100.0)
        with limited_by(limit):
            until_s = limit.until(time.monotonic() + 60)
            codes = pool.get(names, np.arange(8), until_s)
        assert (codes == Outcome.OK).sum() == 2
        assert limit.cut
