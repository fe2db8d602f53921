"""The pools of one call are moved in turn, in one job."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
from shelf import (
    ENDED_S,
    Engine,
    attention,
    draft,
    hashes,
    hasty,
    indexer,
    patient,
    states,
)
from stalls import timed

from kvdock.batch import Batch, Operation, Outcome
from kvdock.events import PagesAnswered
from kvdock.plugin.hookspecs import hookimpl
from kvdock.transfer.placement import Placement

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec

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


class Told:
    """Keeps what became of each page."""

    observes_pages = True

    def __init__(self) -> None:
        self.pages: list[PagesAnswered] = []

    @hookimpl
    def kvdock_observe(self, event: object) -> None:
        if isinstance(event, PagesAnswered):
            self.pages.append(event)


@pytest.mark.parametrize("pools", [(attention(),), (attention(), draft())])
def test_observers_hear_of_batches_that_an_abandoned_call_did_not_reach(
    pools: tuple[PoolSpec, ...],
) -> None:
    told = Told()
    core = hasty("get", calls={"batch_pages": 2})
    engine = Engine(pools=pools, core=core, observers=[told])
    go_on = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.operation is Operation.GET:
            go_on.wait(60)

    with engine.attachment as cache:
        names = hashes(6)
        engine.fill(names, range(6))
        assert cache.put(names, engine.where(range(6))).pages == 6
        engine.shelf.trouble = hang
        told.pages.clear()
        assert cache.get(names, engine.where(range(6))).pages == 0
        late = [one for one in told.pages if one.pool == "kv"]
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


class Alarm(BaseException):
    """What a host's handler of signals may raise."""


def test_after_an_interrupt_no_further_pool_begins() -> None:
    engine = Engine(pools=list(POOLS), core=patient())
    go_on = threading.Event()

    def interrupt(_: Batch) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
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
