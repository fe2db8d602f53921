from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from shelf import (
    ENDED_S,
    Engine,
    Heard,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    held_by,
    indexer,
    patient,
    states,
    until,
)
from stalls import Taken, timed

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.errors import KvdockError
from kvdock.events import PagesAnswered
from kvdock.resilience.channel import MemoryUse
from kvdock.transfer.placement import Placement

if TYPE_CHECKING:
    from kvdock.plugin.store import PoolStore
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.executor import Job
    from kvdock.transfer.result import TransferResult


def test_a_late_get_keeps_its_pages_until_it_really_ends() -> None:
    engine = Engine(core=hasty("get"))
    go_on = threading.Event()

    with engine.attachment as cache:
        names = engine.store(4, blank=True)
        engine.shelf.trouble = held_by(go_on, Operation.GET)
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
            engine.shelf.trouble = held_by(gate)
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


def test_closing_under_a_hanging_call_ends_in_time_and_releases_later() -> None:
    before = set(threading.enumerate())
    engine = Engine(core=hasty("exists", "close"))
    go_on = threading.Event()
    engine.shelf.trouble = held_by(go_on)
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


@attrs.define(eq=False)
class Leisurely(Shelf):
    """Takes its time to release."""

    begun: threading.Event = attrs.field(factory=threading.Event)
    go_on: threading.Event = attrs.field(factory=threading.Event)

    def close(self, pool: str) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        time.sleep(0.05)
        self.released.append(pool)


def test_no_call_begins_once_a_pool_is_being_released() -> None:
    shelf = Leisurely()
    engine = Engine([shelf], core=patient())
    channel = engine.attachment._backends.channels["shelf"]
    run, about_to = channel.io, threading.Event()

    def hesitates(*arguments: Any) -> BatchResult:
        # What looked before the closing began, and goes on in the middle of it.
        about_to.set()
        until(lambda: channel._closing)
        return run(*arguments)

    channel.io = hesitates  # type: ignore[method-assign, assignment]  # a slow thread
    calls: list[Batch] = []
    shelf.trouble = calls.append
    moved: list[TransferResult] = []
    storing = threading.Thread(
        target=lambda: moved.append(
            engine.attachment.put(hashes(1), engine.where([0])),
        )
    )
    storing.start()
    assert about_to.wait(60)
    closing = threading.Thread(target=engine.attachment.close)
    closing.start()
    storing.join(60)
    assert moved[0].outcomes["kv"].tolist() == [Outcome.UNAVAILABLE]
    assert not calls
    shelf.go_on.set()
    closing.join(60)
    assert shelf.released == ["kv"]


def test_two_that_close_at_once_release_every_pool() -> None:
    shelf = Leisurely()
    engine = Engine([shelf], [attention(), draft(), indexer()], core=patient())
    both = [threading.Thread(target=engine.attachment.close) for _ in range(2)]
    both[0].start()
    assert shelf.begun.wait(60)
    both[1].start()
    time.sleep(0.05)
    shelf.go_on.set()
    for one in both:
        one.join(60)
    assert sorted(map(str, shelf.released)) == ["draft", "indexer", "kv"]


class Leaving(Shelf):
    def close(self, pool: str) -> None:
        self.released.append(pool)
        raise SystemExit(1)


def test_a_pool_whose_release_would_end_the_thread_keeps_no_other_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Leaving()
    engine = Engine([shelf], [attention(), draft()], core=patient())
    assert engine.attachment.close()
    assert sorted(map(str, shelf.released)) == ["draft", "kv"]
    assert "closing failed with SystemExit: 1" in caplog.text


def test_a_forked_child_misses_at_once_and_releases_nothing() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        channel = cache._backends.channels["shelf"]
        executor = channel.executor
        kept = executor.guard.pid, executor._lock
        # As a thread leaves it that is inside while the process forks.
        executor.guard.pid, executor._lock = os.getpid() + 1, Taken()  # type: ignore[assignment]  # no lock
        assert cache.exists(hashes(1)).best == 0
        stored = cache.put(hashes(1), engine.where([0]))
        assert stored.outcomes["kv"].tolist() == [Outcome.UNAVAILABLE]
        assert cache.clear() == {"shelf": Outcome.UNAVAILABLE}
        assert channel.close(time.monotonic() + 1)
        executor.guard.pid, executor._lock = kept
        assert not engine.shelf.released


POOLS = (attention(), indexer(), draft(), states())


def test_the_pools_of_a_call_are_moved_on_one_thread_in_their_order() -> None:
    engine = Engine(pools=list(POOLS), core=patient())
    seen: list[tuple[str, str]] = []

    def note(batch: Batch) -> None:
        seen.append((batch.pool, threading.current_thread().name))

    with engine.attachment as cache:
        names = hashes(3)
        engine.fill(names, range(3))
        engine.shelf.trouble = note
        for move, last in ((cache.put, True), (cache.get, False)):
            seen.clear()
            assert move(names, engine.where(range(3))).pages == 3
            pools, threads = zip(*seen, strict=True)
            assert sorted(pools) == sorted(one.name for one in POOLS)
            assert pools[-1 if last else 0] == "kv"
            assert {*threads} == {"kvdock-shelf-0"}
        seen.clear()
        assert cache.exists(names).best == 3
        assert {thread for _, thread in seen} == {"kvdock-shelf-0"}
        assert cache["kv"].channel.executor.threads == 1


@pytest.mark.parametrize("pools", [(attention(),), (attention(), draft())])
def test_observers_hear_of_batches_that_an_abandoned_call_did_not_reach(
    pools: tuple[PoolSpec, ...],
) -> None:
    told = Heard(PagesAnswered, pages=True)
    core = hasty("get", calls={"batch_pages": 2})
    engine = Engine(pools=pools, core=core, observers=[told])
    go_on = threading.Event()

    with engine.attachment as cache:
        names = engine.store(6)
        engine.shelf.trouble = held_by(go_on, Operation.GET)
        told.events.clear()
        assert cache.get(names, engine.where(range(6))).pages == 0
        late = [one for one in told.events if one.pool == "kv"]
        heard = {name: one.outcomes.tolist() for one in late for name in one.hashes}
        assert heard.keys() == {*names}
        assert {outcome for one in heard.values() for outcome in one} == {
            Outcome.TIMEOUT
        }
        go_on.set()


def test_a_late_pool_ends_the_call_in_time_and_later_ones_are_not_begun() -> None:
    engine = Engine(pools=list(POOLS), core=hasty("put"))
    go_on = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.pool == "draft":
            go_on.wait(60)

    with engine.attachment as cache:
        engine.shelf.trouble = hang
        names = hashes(2)
        engine.fill(names, range(2))
        stored = timed(lambda: cache.put(names, engine.where([0, -1])), ENDED_S)
        assert stored.pages == 0
        assert stored.outcomes["indexer"].tolist() == [Outcome.OK, Outcome.ABSENT]
        assert stored.outcomes["draft"].tolist() == [Outcome.TIMEOUT, Outcome.ABSENT]
        assert stored.outcomes["mamba"].tolist()[0] == Outcome.TIMEOUT
        assert stored.outcomes["kv"].tolist() == [Outcome.ABSENT] * 2
        assert [one.pool for one in engine.shelf.calls if len(one)].count("kv") == 0
        assert cache.leases("draft").leased_pages == 1
        assert not cache.leases("kv").leased_pages
        engine.shelf.trouble = None
        again = cache.get(names, engine.where([3, 4]))
        assert again.outcomes["kv"].tolist() == [Outcome.ABSENT] * 2
        go_on.set()
        assert cache.leases("draft").wait([0], 5)
        assert cache.wait_idle(60)


def test_after_an_interrupt_no_further_pool_begins() -> None:
    engine = Engine(pools=list(POOLS), core=patient())
    go_on = threading.Event()

    def interrupt(_: Batch) -> None:
        # The thread that waits, or it would not wake before its deadline.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        go_on.wait(60)

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with engine.attachment as cache:
            engine.shelf.trouble = interrupt
            names = hashes(2)
            engine.fill(names, range(2))
            with pytest.raises(Alarm):
                cache.put(names, engine.where(range(2)))
            under_way = engine.shelf.calls[0].pool
            assert cache.leases(under_way).leased_pages == 2
            assert cache["kv"].channel.abandoned_calls == 1
            go_on.set()
            assert cache.wait_idle(60)
            assert len(engine.shelf.calls) == 1
            assert not any(cache.leases(one.name).leased_pages for one in POOLS)
            engine.shelf.trouble = None
            assert cache.put(names, engine.where(range(2))).pages == 2
            assert set(cache.breakers()["shelf"].values()) == {"closed"}
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_defect_in_a_pool_of_a_call_is_raised_in_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(pools=list(POOLS), core=patient())

    def fail(*_: object) -> None:
        raise ValueError("wrong")

    with engine.attachment as cache:
        monkeypatch.setattr(Placement, "move", fail)
        with pytest.raises(ValueError, match="wrong"):
            cache.get(hashes(1), engine.where([0]))
        assert cache.wait_idle(60)
