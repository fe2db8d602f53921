"""Pages of an engine that uses them again as soon as a call returns."""

from __future__ import annotations

import signal
import threading
import time

import attrs
import numpy as np
import pytest
from shelf import Engine, Shelf, hashes, hasty, held_by, patient, until

from kvdock.batch import Batch, BatchResult, MemoryGate, MemoryHold, Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.dock import Dock
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.plugin.manifest import Support
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements, TransferMode
from kvdock.transfer import page_call
from kvdock.transfer.attachment import Attachment

REUSED = 0x77
SAFE = {"staging": "safe"}


class Alarm(BaseException):
    """What a host's handler of signals may raise."""


def gated(core: object = None, **more: object) -> Engine:
    """Attach an engine that cannot hold pages back to a backend with gates."""
    shelf = Shelf(gated=Support.NATIVE, **more)  # type: ignore[arg-type] # its fields
    return Engine([shelf], core=core or hasty("get", "put", calls=SAFE))  # type: ignore[arg-type] # same


@pytest.mark.parametrize("integrity", [Support.NATIVE, Support.NO])
def test_late_bytes_find_the_gate_of_their_pages_closed(integrity: Support) -> None:
    engine, go_on = gated(integrity=integrity), threading.Event()
    names = hashes(4)
    with engine.attachment as cache:
        assert cache.plan.anchor.mode is TransferMode.GATED
        engine.fill(names, range(4))
        assert cache.put(names, engine.where(range(4))).pages == 4
        engine.shelf.trouble = held_by(go_on, Operation.GET)
        late = cache.get(names, engine.where(range(8, 12)))
        assert late.outcomes["kv"].tolist() == [Outcome.TIMEOUT] * 4
        assert not cache.leases("kv").in_use(range(24)).any()
        for memory in engine.memory.values():
            memory[:] = REUSED
        go_on.set()
        assert cache.wait_idle(60)
        assert all((memory == REUSED).all() for memory in engine.memory.values())
        engine.shelf.trouble = None
        assert cache.get(names, engine.where(range(8, 12))).pages == 4
        assert all(engine.holds("kv", name, 8 + at) for at, name in enumerate(names))


@pytest.mark.parametrize("integrity", [Support.NATIVE, Support.NO])
def test_memory_that_changed_after_a_put_was_abandoned_is_not_stored(
    integrity: Support,
) -> None:
    engine, go_on = gated(integrity=integrity), threading.Event()
    names = hashes(3)
    with engine.attachment as cache:
        engine.fill(names, range(3))
        engine.shelf.trouble = held_by(go_on, Operation.PUT)
        assert cache.put(names, engine.where(range(3))).pages == 0
        assert not cache.leases("kv").in_use(range(24)).any()
        for memory in engine.memory.values():
            memory[:] = REUSED
        go_on.set()
        assert cache.wait_idle(60)
        assert not engine.shelf.objects
        assert cache.get(names, engine.where(range(3))).pages == 0


def test_a_call_that_ends_in_time_passes_its_gate() -> None:
    engine = gated(patient(calls=SAFE))
    with engine.attachment as cache:
        names = engine.store(4)
        assert cache.get(names, engine.where(range(8, 12))).pages == 4
        assert all(engine.holds("kv", name, 8 + at) for at, name in enumerate(names))
        moving = (Operation.PUT, Operation.GET)
        calls = [call for call in engine.shelf.calls if call.operation in moving]
        assert all(call.gate is not None and not call.gate.closed for call in calls)
        assert len({id(call.gate) for call in calls}) == len(calls) == 2


def test_a_signal_that_ends_the_wait_frees_the_pages() -> None:
    engine, go_on = gated(patient(calls=SAFE)), threading.Event()

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with engine.attachment as cache:
            names = engine.store(2)
            engine.shelf.trouble = held_by(go_on, Operation.GET)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Alarm):
                cache.get(names, engine.where(range(2)))
            assert not cache.leases("kv").in_use(range(2)).any()
            engine.memory["kv"][:] = REUSED
            go_on.set()
            assert cache.wait_idle(60)
            assert (engine.memory["kv"] == REUSED).all()
    finally:
        signal.signal(signal.SIGALRM, before)


@attrs.define(eq=False)
class Occupying(Shelf):
    """Stays in the gate of its memory until it may go on."""

    go_on: threading.Event = attrs.field(factory=threading.Event)

    def serve(self, handle: str, batch: Batch) -> BatchResult:
        if batch.operation is Operation.GET and batch.gate is not None:
            assert batch.gate.enter()
            self.go_on.wait(60)
            batch.gate.leave()
        return super().serve(handle, batch)


def test_a_backend_that_stays_in_its_gate_keeps_the_pages_leased(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It breaks its promise; the engine goes on, and the log says so."""
    monkeypatch.setattr(page_call, "GATE_CLOSE_S", 0.05)
    shelf = Occupying(gated=Support.NATIVE)
    engine = Engine([shelf], core=hasty("get", calls=SAFE))
    with engine.attachment as cache:
        names = engine.store(2)
        assert cache.get(names, engine.where(range(2))).pages == 0
        assert cache.leases("kv").in_use(range(2)).all()
        assert "stays in the gate of its pages of pool kv" in caplog.text
        shelf.go_on.set()
        assert cache.wait_idle(60)
        assert not cache.leases("kv").in_use(range(2)).any()


def test_pages_that_a_backend_holds_all_the_same_stay_leased() -> None:
    engine = gated(patient(calls=SAFE))
    hold = MemoryHold()

    def holds(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.GET:
            return attrs.evolve(BatchResult.all(batch, Outcome.UNAVAILABLE), hold=hold)
        return None

    with engine.attachment as cache:
        engine.shelf.trouble = holds
        cache.get(hashes(2), engine.where(range(2)))
        assert cache.leases("kv").in_use(range(2)).all()
        hold.release()
        assert not cache.leases("kv").in_use(range(2)).any()


@pytest.mark.parametrize(
    ("planned", "asked", "gates"),
    [
        (StagingPolicy.SAFE, StagingPolicy.SAFE, True),
        (StagingPolicy.SAFE, StagingPolicy.ROUTED, True),
        (StagingPolicy.SAFE, StagingPolicy.ALWAYS, False),
        (StagingPolicy.ROUTED, StagingPolicy.SAFE, False),
    ],
)
def test_a_pool_is_staged_unless_plan_and_settings_agree_on_a_gate(
    planned: StagingPolicy, asked: StagingPolicy, *, gates: bool
) -> None:
    engine = Engine([Shelf(gated=Support.NATIVE)])
    engine.attachment.close()
    shelf = Shelf(gated=Support.NATIVE)
    dock = Dock({"shelf": shelf.backend()})
    plan = dock.plan(engine.pools, Shard(), needs=RouteRequirements(staging=planned))
    regions = {"kv": Region.of(engine.pools[0], Shard(), [engine.memory["kv"]], 24)}
    core = patient(calls={"staging": str(asked)})
    space = Namespace(model="m")
    with Attachment.open(dock, plan, space, regions, core=core) as cache:
        assert (cache["kv"].nearest.steps.staging is None) == gates
        names = hashes(1)
        assert cache.put(names, {"kv": np.arange(1)}).pages == 1
        assert (shelf.calls[-1].gate is not None) == gates


def test_a_staged_batch_is_no_larger_than_a_cache_takes() -> None:
    core = patient(calls={"staging": "always", "staging_bytes": 4096})
    engine = Engine(core=core)
    with engine.attachment as cache:
        pool = cache["kv"]
        names = engine.store(20)
        most = max(len(call) for call in engine.shelf.calls)
        assert most == pool.nearest.batch_pages == max(1, 4096 // pool.page_bytes)
        assert pool.nearest.steps.staging is not None
        assert len(pool.nearest.steps.staging._free[0].rows) == most
        assert cache.get(names, engine.where(range(20))).pages == 20


def test_closing_a_gate_waits_for_the_copy_that_is_under_way() -> None:
    gate, memory = MemoryGate(), np.zeros(4, np.uint8)
    assert gate.enter()
    closed = threading.Event()

    def close() -> None:
        assert gate.close(time.monotonic() + 60)
        memory[:] = REUSED
        closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    until(lambda: gate.closed)
    assert not gate.enter()
    assert not closed.is_set()
    memory[:] = 1
    gate.leave()
    closer.join()
    assert (memory == REUSED).all()
