"""Memory that a backend may still touch after it has answered."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import numpy as np
import pytest
from shelf import Engine, Heard, Shelf, hasty, memory_at, patient, until

from kvdock.batch import Batch, BatchResult, MemoryHold, Operation, Outcome
from kvdock.events import MemoryHeld


@attrs.define(eq=False)
class Holding(Shelf):
    """Gives up every GET, and holds its memory until the test releases it."""

    holds: list[MemoryHold] = attrs.field(factory=list)
    batches: list[Batch] = attrs.field(factory=list)
    giving_up: bool = True
    ends_with_release: bool = False
    begun: threading.Event = attrs.field(factory=threading.Event)
    go_on: threading.Event | None = None

    def serve(self, handle: str, batch: Batch) -> BatchResult:
        if batch.operation is not Operation.GET or not self.giving_up:
            return super().serve(handle, batch)
        self.begun.set()
        if self.go_on is not None:
            assert self.go_on.wait(60)
        hold = MemoryHold()
        self.holds.append(hold)
        self.batches.append(batch)
        failed = BatchResult.all(batch, Outcome.UNAVAILABLE)
        return BatchResult(failed.outcomes, failed.nbytes, hold)

    def land(self) -> None:
        """Write late bytes into the memory of every held batch."""
        for batch in self.batches:
            for at, size in zip(
                batch.addresses.ravel().tolist(),
                batch.sizes.ravel().tolist(),
                strict=True,
            ):
                memory_at(at, size)[:] = b"\xdd" * size

    def close(self, pool: str) -> None:
        self.released.append(pool)
        if self.ends_with_release:
            for hold in self.holds:
                hold.release()


def engine_with(shelf: Holding, **more: Any) -> Engine:
    settings = {"breaker": {"failures": 1000}} | more
    return Engine([shelf], core=patient(**settings))


@pytest.mark.parametrize("staging", ["routed", "always"])
def test_late_bytes_of_a_held_batch_never_reach_a_page_in_another_use(
    staging: str,
) -> None:
    shelf = Holding()
    engine = engine_with(shelf, calls={"staging": staging})
    with engine.attachment as cache:
        names = engine.store(4)
        engine.blank()
        lost = cache.get(names[:2], engine.where(range(2)))
        assert lost.pages == 0
        shelf.giving_up = False
        # The same pages and others: what is held is rejected or elsewhere.
        loaded = cache.get(names, engine.where(range(4)))
        held = cache.leases("kv").in_use(range(4))
        shelf.land()
        for page, outcome in enumerate(loaded.outcomes["kv"].tolist()):
            assert (outcome == Outcome.OK) == (not held[page])
            assert held[page] or engine.holds("kv", names[page], page)
        assert held.tolist() == [staging == "routed"] * 2 + [False] * 2
        shelf.holds[0].release()
        assert not cache.leases("kv").in_use(range(4)).any()
        assert cache.get(names, engine.where(range(4))).pages == 4
        assert all(engine.holds("kv", name, at) for at, name in enumerate(names))


def test_an_answer_that_breaks_the_contract_still_holds_its_memory() -> None:
    shelf = Holding()
    engine = engine_with(shelf)
    with engine.attachment as cache:
        names = engine.store(2)
        hold = MemoryHold()
        shelf.trouble = lambda batch: (
            BatchResult([0], [0], hold) if batch.operation is Operation.GET else None
        )
        lost = cache.get(names, engine.where(range(2)))
        assert lost.outcomes["kv"].tolist() == [Outcome.ERROR] * 2
        assert cache.leases("kv").in_use(range(2)).all()
        hold.release()
        assert not cache.leases("kv").in_use(range(2)).any()


def test_closing_reports_that_bytes_may_land_until_the_hold_is_released() -> None:
    shelf = Holding()
    engine = engine_with(shelf)
    cache = engine.attachment
    leases = cache.leases("kv")
    cache.get(engine.store(2), engine.where(range(2)))
    assert not cache.close(0.5)
    assert shelf.released == ["kv"], "its pool is released all the same"
    assert leases.in_use(range(2)).all()
    assert not cache.wait_idle(0.01)
    shelf.holds[0].release()
    assert cache.wait_idle(60)
    assert cache.close(5)
    assert not leases.in_use(range(2)).any()


def test_a_hold_that_ends_with_the_release_of_its_pool_lets_closing_succeed() -> None:
    shelf = Holding(ends_with_release=True)
    engine = engine_with(shelf)
    cache = engine.attachment
    leases = cache.leases("kv")
    cache.get(engine.store(2), engine.where(range(2)))
    assert leases.in_use(range(2)).all()
    assert cache.close(10)
    assert not leases.in_use(range(2)).any()


def test_an_abandoned_call_that_ends_with_a_hold_keeps_its_pages() -> None:
    shelf = Holding(go_on=threading.Event())
    core = attrs.evolve(hasty("get"), breaker=patient().breaker)
    engine = Engine([shelf], core=core)
    with engine.attachment as cache:
        names = engine.store(2)
        loaded = cache.get(names, engine.where(range(2)))
        assert loaded.outcomes["kv"].tolist() == [Outcome.TIMEOUT] * 2
        assert shelf.go_on is not None
        shelf.go_on.set()
        channel = cache._backends.channels["shelf"]
        until(lambda: channel.abandoned_calls == 0)
        assert cache.leases("kv").in_use(range(2)).all()
        assert not cache.wait_idle(0.01)
        shelf.holds[0].release()
        assert cache.wait_idle(60)
        assert not cache.leases("kv").in_use(range(2)).any()


def test_a_hold_that_is_released_already_costs_no_page_that_came_whole() -> None:
    shelf = Holding(giving_up=False)
    engine = engine_with(shelf)
    hold = MemoryHold()
    hold.release()
    with engine.attachment as cache:
        names = engine.store(2)

        def answer(batch: Batch) -> BatchResult:
            return attrs.evolve(shelf.serve("kv", batch), hold=hold)

        shelf.trouble = answer
        assert cache.get(names, engine.where(range(2))).pages == 2
        assert not cache.leases("kv").in_use(range(2)).any()


def test_pages_that_came_whole_in_a_held_batch_are_misses() -> None:
    shelf = Holding(giving_up=False)
    engine = engine_with(shelf)
    hold = MemoryHold()
    with engine.attachment as cache:
        names = engine.store(2)

        def answer(batch: Batch) -> BatchResult:
            return attrs.evolve(shelf.serve("kv", batch), hold=hold)

        shelf.trouble = answer
        loaded = cache.get(names, engine.where(range(2)))
        assert loaded.outcomes["kv"].tolist() == [Outcome.TIMEOUT] * 2
        hold.release()


def test_a_backend_that_holds_too_many_batches_moves_no_more_until_a_release() -> None:
    shelf = Holding()
    engine = engine_with(shelf, calls={"max_abandoned_calls": 3})
    with engine.attachment as cache:
        names = engine.store(8)
        for page in range(8):
            cache.get(names[page : page + 1], engine.where([page]))
        assert len(shelf.holds) == 3
        assert cache.leases("kv").leased_pages == 3
        assert cache.exists(names).best == 8, "lookups need no memory"
        shelf.holds[0].release()
        shelf.giving_up = False
        assert cache.get(names[3:4], engine.where([3])).pages == 1
        for hold in shelf.holds:
            hold.release()


def test_observers_hear_how_many_batches_are_held() -> None:
    shelf, heard = Holding(), Heard(MemoryHeld)
    core = patient(breaker={"failures": 1000})
    engine = Engine([shelf], core=core, observers=[heard])
    with engine.attachment as cache:
        names = engine.store(2)
        for page in range(2):
            cache.get(names[page : page + 1], engine.where([page]))
        for hold in shelf.holds:
            hold.release()
            hold.release()
        assert [one.batches for one in heard.events] == [1, 2, 1, 0]


def test_the_memory_of_a_held_test_page_counts_as_held() -> None:
    shelf = Holding()
    engine = engine_with(shelf)
    cache = engine.attachment
    probe = cache["kv"].nearest.health_check
    probe.run(Operation.GET, float("inf"))
    assert not cache.wait_idle(0.01)
    shelf.holds[0].release()
    assert cache.wait_idle(60)
    assert [one.ok for one in cache.self_test()] == [True, True, False, True]
    assert not cache.wait_idle(0.01)
    shelf.holds[1].release()
    assert cache.close(5)


def test_a_hold_of_another_type_breaks_the_contract(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Holding(giving_up=False)
    engine = engine_with(shelf)
    with engine.attachment as cache:
        names = engine.store(1)
        strange: Any = "a word"

        def answer(batch: Batch) -> BatchResult:
            done = np.zeros(len(batch), np.uint8)
            return BatchResult(done, batch.object_bytes, strange)

        shelf.trouble = answer
        assert cache.get(names, engine.where([0])).pages == 0
        assert "a str as hold" in caplog.text
