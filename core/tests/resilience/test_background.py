"""What hangs in the background keeps nothing out that works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from shelf import Engine, Shelf, hashes, hasty, patient, until
from stalls import timed

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.resilience.background import PendingDeletes

if TYPE_CHECKING:
    from collections.abc import Iterator


QUICK: dict[str, Any] = {
    "backoff": "10 ms",
    "max_backoff": "20 ms",
    "probe_timeout": "50 ms",
}


class Outage:
    """Calls that begin while it lasts hang; some say for how long."""

    def __init__(self, *operations: Operation) -> None:
        self.operations = operations or tuple(Operation)
        self.on = True
        self.hung = 0
        self.over = threading.Event()

    def __call__(self, batch: Batch) -> BatchResult | None:
        if self.on and batch.operation in self.operations:
            self.hung += 1
            self.over.wait(30)
        return None


@pytest.fixture
def outage() -> Iterator[Outage]:
    """An outage of all operations whose calls end with the test."""
    made = Outage()
    yield made
    made.over.set()


def loads(engine: Engine, names: list[str], first: int) -> bool:
    places = engine.where(range(first, first + len(names)))
    return engine.attachment.get(names, places).pages == len(names)


def damage(engine: Engine, name: str) -> None:
    key = next(key for key in engine.shelf.objects if name in key)
    wrong = bytearray(engine.shelf.objects[key])
    wrong[3] ^= 1
    engine.shelf.objects[key] = bytes(wrong)


def test_calls_that_never_end_do_not_keep_a_healthy_store_out(outage: Outage) -> None:
    engine = Engine(core=hasty("get", breaker=QUICK))
    with engine.attachment as cache:
        names = engine.store(4)
        engine.shelf.trouble = outage
        for first in (4, 8):
            assert not loads(engine, names, first)
        # So many probes hang that none would be left, were they not fewer
        # the longer it lasts.
        until(lambda: not loads(engine, names, 12) and outage.hung >= 5)
        outage.on = False
        until(lambda: loads(engine, names, 12))
        assert cache.breakers()["shelf"][Operation.GET] == "closed"
        assert engine.shelf.inside == outage.hung
        outage.over.set()
        assert cache.wait_idle(60)


def test_hung_probes_are_so_many_and_no_more_and_that_is_said_once(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    core = hasty(
        "exists", breaker={**QUICK, "backoff": "1 ms", "max_hanging_probes": 3}
    )
    engine = Engine(core=core)
    said = "stays cut off, and no probe is started: 3 probes have not ended"
    with engine.attachment as cache, caplog.at_level(logging.WARNING):
        engine.shelf.trouble = outage
        until(lambda: cache.exists(hashes(1)).best == 0 and said in caplog.text)
        for _ in range(50):
            timed(lambda: cache.exists(hashes(1)), 0.05)
        assert outage.hung == 2 + 3
        assert caplog.text.count(said) == 1
        # Once they end it is used again, as long as it has waited by now.
        outage.on = False
        outage.over.set()
        names = engine.store(4)
        until(lambda: cache.exists(names).best == 4)


def test_too_many_calls_that_hang_cut_off_what_works_until_a_probe_says_so(
    outage: Outage,
) -> None:
    outage.operations = (Operation.GET,)
    core = hasty(
        "get",
        breaker={**QUICK, "abandoned_calls": 99},
        calls={"max_abandoned_calls": 2},
    )
    engine = Engine(core=core)
    with engine.attachment as cache:
        names = engine.store(4)
        engine.shelf.trouble = outage
        for first in (4, 8):
            loads(engine, names, first)
        assert cache.exists(names).best == 0
        assert cache.breakers()["shelf"][Operation.EXISTS] == "open"
        until(lambda: cache.exists(names).best == 4)
        outage.over.set()


def test_deletions_that_hang_leave_probes_their_room(outage: Outage) -> None:
    outage.operations = (Operation.DELETE,)
    failing = False

    def trouble(batch: Batch) -> BatchResult | None:
        if failing and batch.operation is Operation.GET:
            return BatchResult.all(batch, Outcome.ERROR)
        return outage(batch)

    engine = Engine(core=patient(breaker={**QUICK, "failures": 1}))
    with engine.attachment as cache:
        names = engine.store(6)
        engine.shelf.trouble = trouble
        for name in names[:5]:
            damage(engine, name)
            assert not loads(engine, [name], 10)
        failing = True
        assert not loads(engine, names[5:], 11)
        failing = False
        until(lambda: loads(engine, names[5:], 11))
        outage.over.set()
        assert cache.wait_idle(60)


def test_a_put_does_not_wait_for_a_deletion_that_was_given_up(outage: Outage) -> None:
    outage.operations = (Operation.DELETE,)
    engine = Engine(core=hasty("delete", breaker={"backoff": "10 s"}))
    with engine.attachment as cache:
        names = engine.store(4)
        engine.shelf.trouble = outage
        for name in names[:3]:
            damage(engine, name)
        assert not loads(engine, names[:1], 10)
        began = time.monotonic()
        # It waits for the deletion's deadline, twice what one call may take.
        cache.put(names, engine.where(range(4)))
        assert 0.4 < time.monotonic() - began < 5
        timed(lambda: cache.put(names, engine.where(range(4))), 0.2)
        # The second one that hangs is the last one that is tried.
        assert not loads(engine, names[1:2], 11)
        cache.put(names, engine.where(range(4)))
        assert not loads(engine, names[2:3], 12)
        assert cache.breakers()["shelf"][Operation.DELETE] == "open"
        assert outage.hung == 2
        outage.over.set()
        assert cache.wait_idle(60)


def test_deletions_are_tried_again_once_a_probe_could_delete(outage: Outage) -> None:
    outage.operations = (Operation.DELETE,)
    core = hasty("delete", breaker={**QUICK, "abandoned_calls": 1})
    engine = Engine(core=core)
    with engine.attachment as cache:
        names = engine.store(2)
        engine.shelf.trouble = outage
        for name in names:
            damage(engine, name)
        assert not loads(engine, names[:1], 10)
        channel = cache.pools_by_name["kv"].channel
        until(
            lambda: (
                not channel.background.pending_deletes.pending(
                    list(engine.shelf.objects)
                ).any()
            )
        )
        assert not loads(engine, names[1:], 11)
        assert cache.breakers()["shelf"][Operation.DELETE] == "open"
        outage.on = False
        until(
            lambda: not loads(engine, names[1:], 11) and len(engine.shelf.objects) == 1
        )
        assert cache.breakers()["shelf"][Operation.DELETE] == "closed"
        outage.over.set()
        assert cache.wait_idle(60)


@pytest.mark.parametrize("fails", ["raises", "answers"])
def test_deletions_that_fail_open_their_breaker(fails: str) -> None:
    def trouble(batch: Batch) -> BatchResult | None:
        if batch.operation is not Operation.DELETE:
            return None
        if fails == "raises":
            raise OSError("read only")
        return BatchResult.all(batch, Outcome.ERROR)

    engine = Engine(core=patient(breaker={"failures": 2, "backoff": "10 s"}))
    with engine.attachment as cache:
        names = engine.store(3)
        engine.shelf.trouble = trouble
        for name in names:
            damage(engine, name)
            assert not loads(engine, [name], 10)
            assert cache.wait_idle(60)
        assert cache.breakers()["shelf"][Operation.DELETE] == "open"
        deletions = [one for one in engine.shelf.calls if one.operation == "delete"]
        assert len(deletions) == 2


def test_a_deletion_past_its_deadline_starts_no_further_batch(outage: Outage) -> None:
    outage.operations = (Operation.DELETE,)
    engine = Engine([Shelf(max_batch_keys=1)], core=hasty("delete"))
    with engine.attachment as cache:
        names = engine.store(4)
        attached = cache.pools_by_name["kv"]
        engine.shelf.trouble = outage
        attached.channel.background.delete_corrupt(
            attached.handle, "kv", attached.keys(names)
        )
        pending = attached.channel.background.pending_deletes
        until(lambda: not pending.pending(attached.keys(names)).any())
        outage.over.set()
        assert cache.wait_idle(60)
        deletions = [one for one in engine.shelf.calls if one.operation == "delete"]
        assert len(deletions) == 1
        assert len(engine.shelf.objects) == 3


def test_closing_ends_a_deletion_after_the_batch_under_way() -> None:
    engine = Engine([Shelf(max_batch_keys=1)], core=patient())
    names = engine.store(4)
    attached = engine.attachment.pools_by_name["kv"]
    begun, go_on = threading.Event(), threading.Event()

    def trouble(batch: Batch) -> None:
        if batch.operation is Operation.DELETE:
            begun.set()
            go_on.wait(60)

    engine.shelf.trouble = trouble
    attached.channel.background.delete_corrupt(
        attached.handle, "kv", attached.keys(names)
    )
    assert begun.wait(60)
    assert not engine.attachment.close(0.0)
    go_on.set()
    assert engine.attachment.wait_idle(60)
    assert len(engine.shelf.objects) == 3


def test_probes_of_a_kind_make_calls_of_that_kind_but_never_clear_or_send() -> None:
    engine = Engine()
    with engine.attachment as cache:
        probe = cache["kv"].nearest.health_check
        for operation in Operation:
            engine.shelf.calls.clear()
            probe.run(operation, time.monotonic() + 5)
            made = [one.operation for one in engine.shelf.calls]
            assert made == {
                Operation.PUT: [Operation.PUT, Operation.DELETE],
                Operation.CLEAR: [Operation.EXISTS],
                Operation.SEND: [Operation.EXISTS],
            }.get(operation, [operation])


def test_staging_that_calls_hold_for_ever_is_missed_at_once(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    core = hasty(
        "get",
        breaker={**QUICK, "abandoned_calls": 2},
        calls={"staging": StagingPolicy.ALWAYS, "staging_buffers": 2},
    )
    engine = Engine(core=core)
    with engine.attachment as cache:
        names = engine.store(4)
        engine.shelf.trouble = outage
        for first in (4, 8):
            assert not loads(engine, names, first)
        outage.on = False
        breakers = cache.breakers
        until(
            lambda: (
                not loads(engine, names, 12)
                and breakers()["shelf"][Operation.GET] != "open"
            )
        )
        assert not timed(lambda: loads(engine, names, 12), 0.1)
        assert "hold all its staging memory" in caplog.text
        outage.over.set()
        until(lambda: loads(engine, names, 12))


def test_the_late_end_of_a_deletion_does_not_end_the_next_one() -> None:
    pending_deletes = PendingDeletes()
    hung = pending_deletes.start(["a", "b"])
    pending_deletes.finish(hung)
    assert pending_deletes.start(["a"]) == ("a",)
    pending_deletes.finish(hung)
    assert pending_deletes.pending(["a", "b"]).tolist() == [True, False]


def test_a_key_is_dropped_by_one_deletion_at_a_time() -> None:
    pending_deletes = PendingDeletes()
    first = pending_deletes.start(["a", "b"])
    second = pending_deletes.start(["b", "c"])
    assert (first, second) == (("a", "b"), ("c",))
    assert pending_deletes.start(["a", "c"]) == ()
    assert pending_deletes.pending(["c", "x", "a"]).tolist() == [True, False, True]
    pending_deletes.finish(first)
    assert pending_deletes.pending(["c", "x", "a"]).tolist() == [True, False, False]
    pending_deletes.finish(second)
    assert not pending_deletes.by_key
