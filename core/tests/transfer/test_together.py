"""The pools of one call: one thread moves them, in turn."""

from __future__ import annotations

import os
import signal
import threading

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
    until,
)
from stalls import timed

from kvdock.batch import Batch, Outcome
from kvdock.resilience.executor import BackgroundThread
from kvdock.transfer import together
from kvdock.transfer.together import OneThread

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
            assert {*threads} == {"kvdock-pools-0"}


def threads_for_pools() -> set[threading.Thread]:
    """Return those of all attachments: another test may have left some open."""
    return {one for one in threading.enumerate() if "kvdock-pools" in one.name}


def test_one_pool_needs_no_thread_but_that_of_its_backend() -> None:
    others = threads_for_pools()
    engine = Engine(pools=[attention()], core=patient())
    with engine.attachment as cache:
        engine.fill(hashes(1), [0])
        assert cache.put(hashes(1), engine.where([0])).pages == 1
        assert threads_for_pools() <= others


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


def test_after_an_interrupt_no_further_pool_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(pools=list(POOLS), core=patient())
    go_on, start = threading.Event(), together._Turn.start

    def interrupt(_: Batch) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        go_on.wait(60)

    def ring(*_: object) -> None:
        raise Alarm

    def started(turn: together._Turn) -> bool:
        if turn.stopped:  # the caller has been interrupted, and is about to wait
            go_on.set()
        return start(turn)

    monkeypatch.setattr(together._Turn, "start", started)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with engine.attachment as cache:
            engine.shelf.trouble = interrupt
            names = hashes(2)
            engine.fill(names, range(2))
            with pytest.raises(Alarm):
                cache.put(names, engine.where(range(2)))
            assert go_on.is_set()
            assert len(engine.shelf.calls) == 1
            assert not any(cache.leases(one.name).leased_pages for one in POOLS)
            engine.shelf.trouble = None
            assert cache.put(names, engine.where(range(2))).pages == 2
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_a_pool_is_the_callers() -> None:
    one = OneThread(1)

    def fail(_: str) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        one.run(["kv"], fail)
    one.close()
    assert one.join(float("inf"))


def test_a_call_of_a_background_task_or_of_a_closed_one_runs_where_it_is() -> None:
    one, where = OneThread(1), list[int]()

    def note(_: str) -> None:
        where.append(threading.get_ident())

    task = BackgroundThread(target=lambda: one.run(["kv"], note))
    task.start()
    task.join()
    one.close()
    one.run(["kv"], note)
    assert where == [task.ident, threading.get_ident()]


def test_a_call_that_finds_all_threads_in_use_runs_on_its_own() -> None:
    one, go_on, begun = OneThread(1), threading.Event(), threading.Event()

    def hang(_: str) -> None:
        begun.set()
        go_on.wait(60)

    other = threading.Thread(target=lambda: one.run(["kv"], hang))
    other.start()
    assert begun.wait(60)
    found: list[int] = []
    one.run(["kv"], lambda _: found.append(threading.get_ident()))
    assert found == [threading.get_ident()]
    go_on.set()
    other.join(60)
    one.close()
    assert one.join(float("inf"))


def test_closing_leaves_no_thread() -> None:
    others = threads_for_pools()
    engine = Engine(pools=list(POOLS), core=patient())
    with engine.attachment as cache:
        engine.fill(hashes(1), [0])
        cache.put(hashes(1), engine.where([0]))
        assert threads_for_pools() - others
    assert until(lambda: threads_for_pools() <= others)
