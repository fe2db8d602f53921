from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import pytest
from shelf import (
    HASTE_S,
    Engine,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    indexer,
    patient,
    states,
    until,
)
from stalls import Taken, timed

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.dock import Dock
from kvdock.errors import KvdockError, RegionError
from kvdock.namespace import Namespace
from kvdock.pools.shard import Shard
from kvdock.region import Region
from kvdock.transfer.attachment import Attachment
from kvdock.transfer.futures import TransferFuture, TransferState
from kvdock.transfer.manager import TransferManager
from kvdock.transfer.result import NO_PAGE


def engine_with(*pools: Any, **transfers: Any) -> Engine:
    core = patient(transfers={"batch_pages": 2, **transfers})
    return Engine([Shelf()], pools or (attention(),), core)


def hurried(*calls: str) -> Engine:
    core = hasty(*calls, transfers={"batch_pages": 2})
    return Engine([Shelf()], (attention(),), core)


def stored(engine: Engine, count: int) -> list[str]:
    names = hashes(count)
    engine.fill(names, range(count))
    assert engine.attachment.put(names, engine.where(range(count))).pages == count
    engine.blank()
    engine.shelf.calls.clear()
    return names


def test_a_prefetch_loads_in_batches_and_says_how_far_it_is() -> None:
    engine = engine_with()
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 7)
        future = session.prefetch(names, {"kv": range(7)})
        assert future.wait(60)
        assert (future.state, future.moved_pages) == (TransferState.DONE, 7)
        assert future.result is not None
        assert future.result.pages == 7
        assert [len(call) for call in engine.shelf.calls] == [2, 2, 2, 1]
        assert all(engine.holds("kv", name, at) for at, name in enumerate(names))


def test_an_offload_writes_each_batch_sidecars_first() -> None:
    engine = engine_with(attention(), indexer())
    with TransferManager(engine.attachment) as session:
        names = hashes(3)
        engine.fill(names, range(3))
        ended = threading.Event()
        future = session.offload(names, {"kv": range(3)}, lambda _: ended.set())
        assert ended.wait(60)
        assert future.result is not None
        assert future.result.pages == 3
        order = [call.pool for call in engine.shelf.calls]
        assert order == ["indexer", "kv", "indexer", "kv"]


@pytest.mark.parametrize("begin", ["offload", "prefetch"])
def test_a_session_can_be_closed_by_what_follows_a_transfer(begin: str) -> None:
    engine = Engine(core=patient(transfers={"batch_pages": 2}))
    session = TransferManager(engine.attachment)
    names = hashes(4)
    engine.fill(names, range(4))
    engine.attachment.put(names, {"kv": range(4)})
    closed = []
    over = threading.Event()

    def close(_: TransferFuture) -> None:
        closed.append(timed(session.close, 2))
        over.set()

    getattr(session, begin)(names, {"kv": range(4)}, ended=close)
    assert over.wait(60)
    assert closed == [True]


def test_a_trailing_window_is_read_at_the_boundary_that_was_reached() -> None:
    engine = engine_with(attention(), states())
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 6)
        # The fifth attention page is gone, and the state of the fourth.
        for key in list(engine.shelf.objects):
            if f"/{names[4]}.kv" in key or f"/{names[3]}.mamba" in key:
                del engine.shelf.objects[key]
        future = session.prefetch(names, {"kv": range(6)}, {"mamba": [11]})
        assert future.wait(60)
        result = future.result
        assert result is not None
        assert result.pages == 3
        assert result.page_indices["mamba"].tolist() == [-1, -1, 11, -1, -1, -1]
        assert engine.holds("mamba", names[2], 11)


def test_a_window_that_is_lost_on_the_way_moves_the_boundary_back() -> None:
    engine = engine_with(attention(), states())
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 4)

        def lose_the_last_state(batch: Batch) -> BatchResult | None:
            if batch.operation is Operation.GET and batch.pool == "mamba":
                lost = [f"/{names[3]}" in key for key in batch.keys]
                if any(lost):
                    return BatchResult.of(batch, [Outcome.ABSENT])
            return None

        engine.shelf.trouble = lose_the_last_state
        future = session.prefetch(names, {"kv": range(4)}, {"mamba": [9]})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 3
        assert engine.holds("mamba", names[2], 9)


def test_a_missing_draft_does_not_cut_the_prefix() -> None:
    engine = engine_with(attention(), draft())
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 5)
        for key in list(engine.shelf.objects):
            if ".draft" in key and f"/{names[0]}" not in key:
                del engine.shelf.objects[key]
        future = session.prefetch(names, {"kv": range(5)})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 5
        assert (future.result.outcomes["draft"] == Outcome.OK).sum() == 1


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


def test_stopping_keeps_what_is_complete() -> None:
    engine = engine_with(attention(), states())
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 8)
        engine.shelf.trouble = gate
        future = session.prefetch(names, {"kv": range(8)}, {"mamba": [20]})
        until(lambda: gate.arrived == 1)
        assert not future.done
        future.stop()
        gate.turns.release(2)
        assert future.wait(60)
        assert future.result is not None
        # The batch under way is kept, with the state at its end.
        assert future.result.pages == 2
        assert engine.holds("mamba", names[1], 20)


def test_cancelling_takes_effect_between_batches_and_frees_the_pages() -> None:
    engine = engine_with()
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 8)
        engine.shelf.trouble = gate
        future = session.prefetch(names, {"kv": range(8)})
        until(lambda: gate.arrived == 1)
        book = engine.attachment.leases("kv")
        assert book.leased_pages == 2
        assert book.in_use(range(8)).all()
        future.cancel()
        gate.turns.release()
        assert future.wait(60)
        assert (future.state, future.result) == (TransferState.CANCELLED, None)
        until(lambda: not book.in_use(range(8)).any())
        assert gate.arrived == 1


def test_a_full_queue_refuses_at_once_instead_of_growing() -> None:
    engine = engine_with(queue=2)
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as session:
        engine.shelf.trouble = gate
        engine.fill(hashes(1), [0])
        first = session.offload(hashes(1), {"kv": [0]})
        until(lambda: gate.arrived == 1)
        others = [session.offload(hashes(1), {"kv": [0]}) for _ in range(3)]
        assert [one.state for one in others] == ["waiting", "waiting", "refused"]
        assert others[-1].done
        engine.shelf.trouble = None
        gate.turns.release()
        assert all(one.wait(60) for one in [first, *others])
        assert not engine.attachment.leases("kv").in_use([0]).any()


def test_a_transfer_without_a_thread_is_refused_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(core=patient())
    names = hashes(4)
    engine.fill(names, range(4))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with TransferManager(engine.attachment) as session:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            future = session.offload(names, engine.where(range(4)))
        assert future.state is TransferState.REFUSED
        assert not engine.attachment.leases("kv").in_use(range(4)).any()
        again = session.offload(names, engine.where(range(4)))
        assert again.wait(60)
        assert again.state is TransferState.DONE


def test_a_forked_child_is_refused_and_waits_for_no_worker() -> None:
    engine = engine_with()
    names = stored(engine, 4)
    with TransferManager(engine.attachment) as session:
        assert session.prefetch(names, engine.where(range(4))).wait(60)
        child = os.fork()
        if not child:
            future = session.prefetch(names, engine.where(range(4)))
            os._exit(0 if future.state is TransferState.REFUSED else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_closes_without_waiting_for_the_parents_workers() -> None:
    session = TransferManager(engine_with().attachment)
    executors = session._reads, session._writes
    kept = [(executor._guard._pid, executor._lock) for executor in executors]
    for executor in executors:
        executor._guard._pid, executor._lock = os.getpid() + 1, Taken()  # type: ignore[assignment]  # no lock
    assert session.drain(1.0)
    assert session.close()
    for executor, (executor._guard._pid, executor._lock) in zip(
        executors, kept, strict=True
    ):
        executor.close()


def test_reads_do_not_wait_for_writes() -> None:
    engine = engine_with()
    gate = Gate(Operation.PUT)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 2)
        engine.shelf.trouble = gate
        engine.fill(hashes(1, first=9), [9])
        slow = session.offload(hashes(1, first=9), {"kv": [9]})
        until(lambda: gate.arrived == 1)
        assert session.prefetch(names, {"kv": range(2)}).wait(60)
        assert not slow.done
        gate.turns.release()


@pytest.mark.parametrize(
    ("policy", "base", "ready"),
    [
        ("best_effort", "1 s", True),
        ("wait_complete", "0 s", False),
        ("timeout", "10 s", False),
        ("timeout", "0 s", True),
    ],
)
def test_the_stop_policy_says_how_long_the_engine_waits(
    policy: str, base: str, *, ready: bool
) -> None:
    engine = engine_with(stop=policy, stop_base=base, stop_growth="0 s")
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 2)
        engine.shelf.trouble = gate
        future = session.prefetch(names, {"kv": range(2)})
        assert future.should_stop_waiting() is ready
        gate.turns.release()
        assert future.wait(60)
        assert future.should_stop_waiting()


def test_more_tokens_get_more_time() -> None:
    engine = engine_with(stop="timeout", stop_base="0 s", stop_growth="1000 s")
    gate = Gate(Operation.GET)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 2)
        engine.shelf.trouble = gate
        assert not session.prefetch(names, {"kv": range(2)}).should_stop_waiting()
        gate.turns.release()


def test_closing_drains_writes_and_leaves_no_thread() -> None:
    before = threading.active_count()
    engine = engine_with()
    session = TransferManager(engine.attachment)
    names = hashes(9)
    engine.fill(names, range(9))
    future = session.offload(names, {"kv": range(9)})
    assert session.close()
    assert future.result is not None
    assert future.result.pages == 9
    assert engine.shelf.released == ["kv"]
    assert threading.active_count() == before


def test_closing_over_a_hanging_store_ends_within_its_deadline() -> None:
    before = threading.active_count()
    engine = hurried("put", "close")
    gate = Gate(Operation.PUT)
    engine.shelf.trouble = gate
    session = TransferManager(engine.attachment)
    engine.fill(hashes(6), range(6))
    tickets = [session.offload(hashes(6), {"kv": range(6)}) for _ in range(3)]
    until(lambda: gate.arrived == 1)
    assert not timed(session.close, HASTE_S + 0.1)
    gate.turns.release(20)
    until(lambda: engine.shelf.released == ["kv"])
    until(lambda: threading.active_count() == before)
    assert all(future.done for future in tickets)


def test_a_store_that_takes_nothing_is_not_asked_for_every_batch() -> None:
    engine = engine_with()
    engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.REFUSED)
    with TransferManager(engine.attachment) as session:
        engine.fill(hashes(8), range(8))
        future = session.offload(hashes(8), {"kv": range(8)})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 0
        assert len(engine.shelf.calls) == 1


def test_an_offload_goes_on_past_pages_that_only_a_sidecar_has() -> None:
    engine = engine_with(attention(), indexer())
    names = hashes(6)
    engine.fill(names, range(6))
    with TransferManager(engine.attachment) as session:
        where = {"kv": [NO_PAGE, NO_PAGE, 2, 3, 4, 5], "indexer": range(6)}
        future = session.offload(names, where)
        assert future.wait(60)
        assert future.result is not None
        assert not future.result.outcomes["indexer"].any()
        assert not future.result.outcomes["kv"][2:].any()


def test_a_stage_without_the_anchor_moves_its_other_pools() -> None:
    shelf, shard = Shelf(), Shard(pp_rank=1, pp_size=2, layers=(2, 4))
    dock = Dock({shelf.name: shelf.backend()})
    plan = dock.plan([attention(), states()], shard)
    memory = np.zeros((8, states().page_bytes(shard)), np.uint8)
    regions = {"mamba": Region.of(states(), shard, [memory], 8)}
    attachment = Attachment.open(
        dock, plan, Namespace(model="m"), regions, core=patient()
    )
    with TransferManager(attachment) as session:
        stored = session.offload(hashes(4), {"mamba": range(4)})
        assert stored.wait(60)
        assert stored.result is not None
        assert stored.result.pages == 4
        loaded = session.prefetch(hashes(4), {"mamba": range(4, 8)})
        assert loaded.wait(60)
        assert loaded.result is not None
        assert loaded.result.pages == 4


def test_bad_input_is_refused_before_it_is_queued() -> None:
    engine = engine_with(attention(), states())
    with TransferManager(engine.attachment) as session:
        with pytest.raises(RegionError, match="not an attached pool with a trailing"):
            session.prefetch(hashes(1), {"kv": [0]}, {"kv": [1]})
        with pytest.raises(RegionError, match="0 spare pages for a window of 1"):
            session.prefetch(hashes(1), {"kv": [0]}, {"mamba": []})
        with pytest.raises(RegionError, match="no pages are given"):
            session.offload(hashes(1), {"kv": [0]})


def test_a_page_that_has_no_place_ends_the_prefix() -> None:
    engine = engine_with()
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 3)
        future = session.prefetch(names, {"kv": np.array([4, NO_PAGE, 5])})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 1


@pytest.mark.parametrize("batch_pages", [1, 4])
def test_a_prefetch_fills_no_page_twice(batch_pages: int) -> None:
    engine = engine_with(batch_pages=batch_pages)
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 3)
        engine.blank()
        future = session.prefetch(names, {"kv": [7, 8, 7]})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 2
        assert engine.holds("kv", names[0], 7)


def test_an_attachment_that_is_closed_meanwhile_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with()
    places = Attachment.resolve_pages

    def closes(self: Attachment, *given: Any) -> Any:
        found = places(self, *given)
        self.close()
        return found

    monkeypatch.setattr(Attachment, "resolve_pages", closes)
    session = TransferManager(engine.attachment)
    with pytest.raises(KvdockError, match="the attachment is closed"):
        session.prefetch(hashes(1), {"kv": [0]})
    session.close()


def test_a_ticket_may_be_waited_for_without_end() -> None:
    engine = engine_with()
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 1)
        assert session.prefetch(names, {"kv": [0]}).wait(math.inf)


def test_a_prefetch_reads_nothing_behind_a_hole() -> None:
    engine = engine_with(attention(), indexer())
    with TransferManager(engine.attachment) as session:
        names = stored(engine, 4)
        gone = next(key for key in engine.shelf.objects if f"/{names[0]}.kv" in key)
        del engine.shelf.objects[gone]
        future = session.prefetch(names, {"kv": range(4)})
        assert future.wait(60)
        assert future.result is not None
        assert future.result.pages == 0
        # The second page was in the same batch; nothing else is asked for.
        assert [call.pool for call in engine.shelf.calls] == ["kv"]


def test_a_generator_of_hashes_is_rejected_at_once() -> None:
    engine = Engine(core=patient())
    with TransferManager(engine.attachment) as session:
        for call in (session.prefetch, session.offload):
            with pytest.raises(KvdockError, match="page hashes are a row"):
                call((name for name in hashes(2)), {"kv": [0, 1]})  # type: ignore[arg-type]
