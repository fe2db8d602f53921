from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest
from shelf import (
    ENDED_S,
    Engine,
    Shelf,
    Trouble,
    hashes,
    hasty,
    patient,
    until,
)
from stalls import timed

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.errors import KvdockError
from kvdock.resilience.channel import MemoryUse

if TYPE_CHECKING:
    from kvdock.plugin.store import PoolStore
    from kvdock.resilience.executor import Job


def waiting_for(event: threading.Event) -> Trouble:
    """Hang until the event, then do as asked, late."""

    def wait(_: Batch) -> None:
        event.wait(60)

    return wait


def test_a_late_get_keeps_its_pages_until_it_really_ends() -> None:
    engine = Engine(core=hasty("get"))
    go_on = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.operation is Operation.GET:
            go_on.wait(60)

    with engine.attachment as cache:
        names = hashes(4)
        engine.fill(names, range(4))
        cache.put(names, engine.where(range(4)))
        engine.blank()
        engine.shelf.trouble = hang
        loaded = timed(lambda: cache.get(names[:2], engine.where([0, 1])), ENDED_S)
        assert loaded.outcomes["kv"].tolist() == [Outcome.TIMEOUT] * 2
        leases = cache.leases("kv")
        assert leases.in_use(range(4)).tolist() == [True, True, False, False]
        # Other pages are free to use, these are refused at once.
        engine.shelf.trouble = None
        again = cache.get(names, engine.where([1, 2, 3, 4]))
        assert again.outcomes["kv"].tolist() == [Outcome.REFUSED, 0, 0, 0]
        stored = cache.put(hashes(1, first=50), engine.where([0]))
        assert stored.outcomes["kv"].tolist() == [Outcome.REFUSED]
        go_on.set()
        assert leases.wait(range(4), 5)
        assert cache.wait_idle(60)
        # The late bytes did land, in memory that no call had used meanwhile.
        assert engine.holds("kv", names[0], 0)


class Alarm(BaseException):  # what a host's handler of signals may raise
    pass


@pytest.mark.parametrize("staging", StagingPolicy)
def test_a_signal_that_ends_the_wait_leaves_the_call_its_memory(
    staging: StagingPolicy,
) -> None:
    engine = Engine(core=patient(calls={"staging": staging, "staging_buffers": 1}))
    names, gate = hashes(4), threading.Event()

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with engine.attachment as cache:
            engine.fill(names, range(4))
            cache.put(names, engine.where(range(4)))
            engine.shelf.trouble = waiting_for(gate)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                cache.get(names, engine.where(range(4)))
            direct = staging is StagingPolicy.ROUTED
            assert cache.leases("kv").in_use(range(4)).all() == direct
            assert not cache.wait_idle(0.0)
            gate.set()
            assert cache.wait_idle(60)
            assert not cache.leases("kv").in_use(range(4)).any()
            assert cache.get(names, engine.where(range(4))).pages == 4
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("staging", StagingPolicy)
@pytest.mark.parametrize(
    "inside",
    [
        "kvdock.transfer.page_call.Batch",
        "kvdock.transfer.integrity.make_trailers",
    ],
)
def test_an_error_before_the_call_leaves_no_page_and_no_area_held(
    staging: StagingPolicy, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    engine = Engine(core=hasty("put", calls={"staging": staging, "staging_buffers": 1}))
    with engine.attachment as cache:
        with monkeypatch.context() as patched:
            patched.setattr(inside, fail)
            with pytest.raises(MemoryError):
                cache.put(hashes(2), engine.where(range(2)))
        assert not cache.leases("kv").in_use(range(2)).any()
        assert cache.put(hashes(2), engine.where(range(2))).pages == 2


def test_late_bytes_of_a_staged_get_never_reach_the_engine() -> None:
    engine = Engine(core=hasty("get", calls={"staging": "always"}))
    go_on = threading.Event()
    with engine.attachment as cache:
        names = hashes(2)
        engine.fill(names, range(2))
        cache.put(names, engine.where(range(2)))
        engine.blank()
        engine.shelf.trouble = waiting_for(go_on)
        assert cache.get(names, engine.where(range(2))).pages == 0
        assert not cache.leases("kv").in_use(range(2)).any()
        go_on.set()
        assert cache.wait_idle(60)
        assert (engine.memory["kv"] == 0xEE).all()


def test_closing_under_a_hanging_call_ends_in_time_and_releases_later() -> None:
    before = set(threading.enumerate())
    engine = Engine(core=hasty("exists", "close"))
    go_on = threading.Event()
    engine.shelf.trouble = waiting_for(go_on)
    cache = engine.attachment
    cache.exists(hashes(1))
    assert not timed(cache.close, ENDED_S)
    assert engine.shelf.released == []
    go_on.set()
    until(lambda: engine.shelf.released == ["kv"])
    until(lambda: not set(threading.enumerate()) - before)
    with pytest.raises(KvdockError, match="closed"):
        cache.exists(hashes(1))


@pytest.mark.parametrize("staging", list(StagingPolicy))
def test_a_late_batch_takes_nothing_from_those_before_it(
    staging: StagingPolicy,
) -> None:
    """Each batch is cut before its memory is prepared, and is whole by itself."""
    core = hasty("get", calls={"staging": staging})
    engine = Engine([Shelf(max_batch_keys=1)], core=core)
    names = hashes(3)
    go_on = threading.Event()
    engine.fill(names, range(3))
    cache = engine.attachment
    assert cache.put(names, engine.where(range(3))).pages == 3
    calls: list[Batch] = []

    def second_hangs(batch: Batch) -> BatchResult | None:
        calls.append(batch)
        if len(calls) == 2:
            go_on.wait(60)
        return None

    engine.shelf.trouble = second_hangs
    moved = cache.get(names, engine.where(range(8, 11)))
    late = Outcome.TIMEOUT
    assert moved.outcomes["kv"].tolist() == [Outcome.OK, late, late]
    assert moved.pages == 1
    assert engine.holds("kv", names[0], 8)
    assert cache.leases("kv").leased_pages == (staging is StagingPolicy.ROUTED)
    go_on.set()
    assert cache.wait_idle(60)
    cache.close()


@pytest.mark.parametrize("staging", list(StagingPolicy))
def test_what_an_abandoned_call_claims_to_have_read_is_a_miss(
    staging: StagingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(core=patient(calls={"staging": staging}))
    names = hashes(2)
    with engine.attachment as cache:
        engine.fill(names, range(2))
        assert cache.put(names, engine.where(range(2))).pages == 2
        channel = cache["kv"].channel
        run, ends = channel.io, []

        def held(
            job: Job, handle: PoolStore, batch: Batch, use: MemoryUse
        ) -> BatchResult:
            use.held = True
            ends.append(use.release)
            return run(job, handle, batch, MemoryUse())

        monkeypatch.setattr(channel, "io", held)
        moved = cache.get(names, engine.where(range(8, 10)))
        assert moved.outcomes["kv"].tolist() == [Outcome.TIMEOUT] * 2
        ends.pop()()
        assert not cache.leases("kv").in_use(range(24)).any()
