"""Reads and writes of one pool in the background."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import pytest
from shelf import (
    ENDED_S,
    HASTE_S,
    Engine,
    Shelf,
    attention,
    hashes,
    hasty,
    patient,
    states,
    until,
)
from stalls import Taken, timed

from kvdock.batch import Batch, Operation, Outcome
from kvdock.errors import KvdockError, RegionError
from kvdock.transfer.manager import TransferManager
from kvdock.transfer.result import NO_PAGE


def engine_with(*pools: Any, **transfers: Any) -> Engine:
    return Engine([Shelf()], pools or (attention(),), patient(transfers=transfers))


class Gate:
    """Holds each GET or PUT until it is let through, one by one."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.turns = threading.Semaphore(0)
        self.arrived = 0

    def __call__(self, batch: Batch) -> None:
        if batch.operation is self.operation:
            self.arrived += 1
            assert self.turns.acquire(timeout=60)


def test_a_read_loads_pages_of_one_pool_and_says_which() -> None:
    engine = engine_with(attention(), states())
    with TransferManager(engine.attachment) as manager:
        names = engine.store(3, blank=True)
        engine.shelf.calls.clear()
        missing = hashes(1, first=90)
        future = manager.read("kv", [*names, *missing], [4, 5, NO_PAGE, 6])
        assert future.wait(60)
        assert future.outcomes.tolist() == [0, 0, Outcome.ABSENT, Outcome.ABSENT]
        assert engine.holds("kv", names[1], 5)
        assert {call.pool for call in engine.shelf.calls} == {"kv"}
        assert future.seconds > 0


def test_what_the_caller_does_with_its_arrays_afterwards_changes_nothing() -> None:
    engine = engine_with()
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        engine.shelf.trouble = gate
        first = manager.read("kv", names[:1], [0])
        until(lambda: gate.arrived == 1)
        pages, given = np.array([7]), [names[1]]
        future = manager.read("kv", given, pages)
        pages[0], given[0] = 9, names[0]
        gate.turns.release(2)
        assert first.wait(60)
        assert future.wait(60)
        assert engine.holds("kv", names[1], 7)


def test_a_transfer_that_waits_for_a_worker_ends_at_its_deadline() -> None:
    engine = engine_with()
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        engine.shelf.trouble = gate
        first = manager.read("kv", names[:1], [0])
        until(lambda: gate.arrived == 1)
        waiting = manager.read("kv", names[1:], [1], timeout_s=HASTE_S)
        with pytest.raises(KvdockError, match="1 pages of pool 'kv' has not ended"):
            _ = waiting.outcomes
        assert timed(lambda: waiting.wait(60), ENDED_S)
        assert waiting.outcomes.tolist() == [Outcome.TIMEOUT]
        assert not first.ended
        gate.turns.release(2)
        assert first.wait(60)
        assert manager.drain(60)
        # The worker that came too late did not move it.
        assert gate.arrived == 1
        assert not engine.holds("kv", names[1], 1)


@pytest.mark.parametrize("staging", ["always", "loads", "routed"])
def test_a_read_that_hangs_ends_in_time_and_is_done_once_its_rows_are_free(
    staging: str,
) -> None:
    core = hasty("get", calls={"staging": staging})
    engine = Engine([Shelf()], (attention(),), core)
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as manager:
        names = engine.store(1, blank=True)
        engine.shelf.trouble = gate
        future = manager.read("kv", names, [3])
        timed(lambda: until(lambda: future.ended), ENDED_S)
        assert future.outcomes.tolist() == [Outcome.TIMEOUT]
        # Staged: late bytes land in memory of the core alone.
        assert future.done is (staging != "routed")
        gate.turns.release(1)
        assert future.wait(60)
        assert manager.drain(60)
        if staging != "routed":
            assert not engine.holds("kv", names[0], 3)


@pytest.mark.parametrize("staging", ["always", "loads"])
def test_a_write_that_hangs_keeps_its_rows_unless_it_is_staged(staging: str) -> None:
    core = hasty("put", calls={"staging": staging})
    engine = Engine([Shelf()], (attention(),), core)
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as manager:
        engine.fill(hashes(1), [3])
        engine.shelf.trouble = gate
        future = manager.write("kv", hashes(1), [3])
        timed(lambda: until(lambda: future.ended), HASTE_S + 0.2)
        assert future.outcomes.tolist() == [Outcome.TIMEOUT]
        assert future.done is (staging == "always")
        gate.turns.release(1)
        assert future.wait(60)
        assert manager.drain(60)


def test_with_staged_loads_what_is_stored_is_read_where_it_lies() -> None:
    core = patient(calls={"staging": "loads"})
    engine = Engine([Shelf()], (attention(),), core)
    with engine.attachment as cache:
        names = hashes(2)
        engine.fill(names, [0, 1])
        assert not cache["kv"].put(names, [0, 1]).any()
        assert not cache["kv"].get(names, [4, 5]).any()
        assert engine.holds("kv", names[1], 5)
        put, get = engine.shelf.calls[-2:]
        memory = engine.memory["kv"]
        span = range(memory.ctypes.data, memory.ctypes.data + memory.nbytes)
        assert {int(at) in span for at in put.addresses[:, 0]} == {True}
        assert {int(at) in span for at in get.addresses[:, 0]} == {False}


def test_reads_do_not_wait_for_writes() -> None:
    engine = engine_with()
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as manager:
        names = engine.store(2, blank=True)
        engine.shelf.trouble = gate
        engine.fill(hashes(1, first=9), [9])
        slow = manager.write("kv", hashes(1, first=9), [9])
        until(lambda: gate.arrived == 1)
        assert manager.read("kv", names, range(2)).wait(60)
        assert not slow.done
        gate.turns.release()


def test_a_full_queue_rejects_at_once_instead_of_growing() -> None:
    engine = engine_with(queue=2)
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as manager:
        engine.shelf.trouble = gate
        engine.fill(hashes(1), [0])
        first = manager.write("kv", hashes(1), [0])
        until(lambda: gate.arrived == 1)
        others = [manager.write("kv", hashes(1), [0]) for _ in range(3)]
        assert [one.ended for one in others] == [False, False, True]
        assert others[-1].outcomes.tolist() == [Outcome.REFUSED]
        engine.shelf.trouble = None
        gate.turns.release()
        assert all(one.wait(60) for one in [first, *others])


def test_transfers_that_have_timed_out_leave_the_queue() -> None:
    engine = engine_with(queue=1)
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as manager:
        engine.shelf.trouble = gate
        engine.fill(hashes(2), [0, 1])
        manager.write("kv", hashes(1), [0])
        until(lambda: gate.arrived == 1)
        late = manager.write("kv", hashes(1), [0], timeout_s=0)
        assert not manager.write("kv", hashes(1, first=1), [1]).ended
        assert late.outcomes.tolist() == [Outcome.TIMEOUT]
        gate.turns.release(2)


def test_a_transfer_without_a_thread_is_rejected_and_later_ones_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with()
    names = hashes(4)
    engine.fill(names, range(4))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with TransferManager(engine.attachment) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            future = manager.write("kv", names, range(4))
        assert set(future.outcomes.tolist()) == {Outcome.UNAVAILABLE}
        again = manager.write("kv", names, range(4))
        assert again.wait(60)
        assert not again.outcomes.any()


def test_a_defect_ends_a_transfer_with_errors_and_not_its_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with()
    names = engine.store(2, blank=True)
    with TransferManager(engine.attachment) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(type(engine.attachment["kv"]), "transfer", None)
            future = manager.read("kv", names, range(2))
            assert future.wait(60)
        assert future.outcomes.tolist() == [Outcome.ERROR] * 2
        assert "kvdock-read: a task failed" in caplog.text
        again = manager.read("kv", names, range(2))
        assert again.wait(60)
        assert not again.outcomes.any()


def test_a_forked_child_is_rejected_and_waits_for_no_worker() -> None:
    engine = engine_with()
    names = engine.store(4, blank=True)
    with TransferManager(engine.attachment) as manager:
        assert manager.read("kv", names, range(4)).wait(60)
        child = os.fork()
        if not child:
            future = manager.read("kv", names, range(4))
            codes = set(future.outcomes.tolist())
            os._exit(0 if codes == {Outcome.UNAVAILABLE} else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_closes_without_waiting_for_the_parents_workers() -> None:
    manager = TransferManager(engine_with().attachment)
    executors = list(manager._executors.values())
    kept = [(executor._guard.pid, executor._lock) for executor in executors]
    for executor in executors:
        executor._guard.pid, executor._lock = os.getpid() + 1, Taken()  # type: ignore[assignment]  # no lock
    assert manager.drain(1.0)
    assert manager.close()
    for executor, (executor._guard.pid, executor._lock) in zip(
        executors, kept, strict=True
    ):
        executor.close()


def test_closing_drains_writes_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = engine_with()
    manager = TransferManager(engine.attachment)
    names = hashes(9)
    engine.fill(names, range(9))
    future = manager.write("kv", names, range(9))
    assert manager.close()
    assert not future.outcomes.any()
    assert engine.shelf.released == ["kv"]
    assert not set(threading.enumerate()) - before
    rejected = manager.read("kv", names, range(9))
    assert set(rejected.outcomes.tolist()) == {Outcome.UNAVAILABLE}


def test_bad_input_is_rejected_before_it_is_queued() -> None:
    engine = engine_with()
    with TransferManager(engine.attachment) as manager:
        with pytest.raises(KvdockError, match="pool 'kw' is not attached"):
            manager.read("kw", hashes(1), [0])
        with pytest.raises(RegionError, match="outside of"):
            manager.write("kv", hashes(1), [10**6])
        with pytest.raises(KvdockError, match="page hashes are a row"):
            manager.read("kv", (name for name in hashes(2)), [0, 1])  # type: ignore[arg-type]
        with pytest.raises(KvdockError, match="a deadline is a number"):
            manager.read("kv", hashes(1), [0], timeout_s=math.nan)
