"""What goes wrong in a backend is an outcome, a breaker and a line in the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from shelf import (
    Engine,
    Shelf,
    ShelfPool,
    hashes,
    hasty,
    patient,
    until,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.errors import AttachError
from kvdock.plugin.hookspecs import hookimpl
from kvdock.resilience.channel import MemoryUse
from kvdock.resilience.executor import Job
from kvdock.transfer.health_check import HealthCheck

if TYPE_CHECKING:
    from kvdock.geometry.region import Region
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

Answer = Callable[[Batch], Any]


def raising(_: Batch) -> BatchResult:
    raise RuntimeError("boom")


class Unspeakable(Exception):  # noqa: N818 - it cannot even be printed
    def __str__(self) -> str:
        raise ValueError("no words")


def speechless(_: Batch) -> BatchResult:
    raise Unspeakable


STRANGE: dict[str, tuple[Answer, str]] = {
    "raises": (raising, "raised RuntimeError: boom"),
    "speechless": (speechless, "raised Unspeakable"),
    "bool": (lambda _: True, "broke the contract"),
    "list": (lambda batch: [0] * len(batch), "broke the contract"),
    "fewer": (lambda _: BatchResult([0], [0]), "broke the contract"),
    "none": (lambda _: BatchResult([], []), "broke the contract"),
}


@pytest.mark.parametrize("way", STRANGE)
def test_an_answer_that_is_none_is_named_in_the_log_and_is_a_miss(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer, said = STRANGE[way]
    engine = Engine(core=patient())
    with engine.attachment as cache:
        names = engine.store(2)
        engine.shelf.trouble = answer
        loaded = cache.get(names, engine.where(range(2)))
        assert loaded.outcomes["kv"].tolist() == [Outcome.ERROR] * 2
        assert said in caplog.text
        assert "get of 2 keys of pool kv" in caplog.text
        assert not cache.leases("kv").in_use(range(2)).any()


def test_failures_open_the_breaker_of_their_operation_alone() -> None:
    engine = Engine(core=patient(breaker={"failures": 2, "backoff": "10 s"}))

    def fail_gets(batch: Batch) -> BatchResult | None:
        return raising(batch) if batch.operation is Operation.GET else None

    with engine.attachment as cache:
        names = engine.store(2)
        engine.shelf.trouble = fail_gets
        for _ in range(4):
            cache.get(names, engine.where(range(2)))
        gets = [one for one in engine.shelf.calls if one.operation is Operation.GET]
        assert len(gets) == 2
        assert cache.breakers()["shelf"][Operation.GET] == "open"
        assert cache.exists(names).best == 2
        loaded = cache.get(names, engine.where(range(2)))
        assert loaded.outcomes["kv"].tolist() == [Outcome.UNAVAILABLE] * 2


@pytest.mark.parametrize("operation", [Operation.GET, Operation.PUT])
def test_probes_go_the_way_of_the_operation_and_clean_up(operation: Operation) -> None:
    engine = Engine(core=patient(breaker={"failures": 1, "backoff": "20 ms"}))
    with engine.attachment as cache:
        names = engine.store(2)
        kept = set(engine.shelf.objects)
        move = cache.get if operation is Operation.GET else cache.put
        engine.shelf.trouble = raising
        move(names, engine.where(range(2)))
        engine.shelf.trouble = None
        engine.shelf.calls.clear()
        until(lambda: move(names, engine.where(range(2))).pages == 2)
        probe = next(one for one in engine.shelf.calls if one.operation is operation)
        assert not set(probe.keys) & kept
        assert cache.wait_idle(60)
        assert set(engine.shelf.objects) == kept


def test_one_dead_object_does_not_open_the_breaker_but_is_not_asked_again() -> None:
    engine = Engine(core=patient(breaker={"failures": 1}))
    with engine.attachment as cache:
        names = engine.store(3)
        dead = next(key for key in engine.shelf.objects if names[1] in key)

        def dead_segment(batch: Batch) -> BatchResult | None:
            if batch.operation is not Operation.GET:
                return None
            found = engine.shelf.serve("kv", batch)
            lost = np.array([key == dead for key in batch.keys])
            codes = np.where(lost, np.uint8(Outcome.TIMEOUT), found.outcomes)
            return BatchResult.of(batch, codes)

        engine.shelf.trouble = dead_segment
        assert cache.get(names, engine.where(range(3))).pages == 1
        assert cache.exists(names).best == 1
        assert cache.breakers()["shelf"][Operation.GET] == "closed"


def test_a_backend_whose_answers_are_all_lost_counts_as_failing() -> None:
    engine = Engine(core=patient(breaker={"failures": 2, "backoff": "10 s"}))
    with engine.attachment as cache:
        engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.UNAVAILABLE)
        for _ in range(3):
            cache.exists(hashes(1))
        assert cache.breakers()["shelf"][Operation.EXISTS] == "open"


def test_a_full_store_is_no_failing_store() -> None:
    engine = Engine(core=patient(breaker={"failures": 1}))
    with engine.attachment as cache:
        engine.fill(hashes(1), [0])
        engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.REFUSED)
        for _ in range(3):
            cache.put(hashes(1), engine.where([0]))
        assert cache.breakers()["shelf"][Operation.PUT] == "closed"


class Slow(Shelf):
    """Takes too long to attach, and then is ready after all."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        self.begun.set()
        self.go_on.wait(60)
        return super().kvdock_register_pool(pool, region, config)

    kvdock_register_pool.kvdock_impl = Shelf.kvdock_register_pool.kvdock_impl  # type: ignore[attr-defined]  # as @hookimpl marks it


def test_attaching_has_a_deadline_and_a_late_handle_is_released() -> None:
    slow = Slow()
    core = hasty("attach", "close")
    while not slow.begun.is_set():  # in time, which a busy machine may not do
        with pytest.raises(AttachError, match=r"did not attach pool 'kv' within"):
            Engine([slow], core=core)
    assert slow.released == []
    slow.go_on.set()
    until(lambda: slow.released == ["kv"])


class Broken(Shelf):
    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        del pool, region, config
        raise PermissionError("no way in")


class Mute(Shelf):
    @hookimpl
    def kvdock_key_suffix(self, pool: PoolSpec, shard: Shard) -> Any:
        del pool, shard


class Quitter(Shelf):
    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        del pool, region, config
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("shelf", "why"),
    [
        (Broken(), "PermissionError: no way in"),
        (Mute(), "no key suffixes"),
        (Quitter(), "SystemExit"),
    ],
)
def test_whatever_goes_wrong_when_attaching_names_backend_and_pool(
    shelf: Shelf, why: str
) -> None:
    with pytest.raises(AttachError, match=f"'shelf'.*'kv'.*{why}"):
        Engine([shelf])


def test_the_self_test_goes_the_whole_way_and_leaves_nothing() -> None:
    engine = Engine(core=patient(self_test=True))
    with engine.attachment as cache:
        assert engine.shelf.objects == {}
        operations = [one.operation for one in engine.shelf.calls]
        assert operations == ["put", "exists", "get", "delete"]
        assert all(finding.ok for finding in cache.self_test())


def test_a_self_test_that_is_interrupted_leaves_nothing_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HealthCheck, "self_test", interrupted)
    shelf = Shelf()
    with pytest.raises(KeyboardInterrupt):
        Engine([shelf], core=patient(self_test=True))
    assert shelf.released == ["kv"]


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        (Operation.PUT, "pool kv: a page was not stored by shelf"),
        (Operation.EXISTS, "pool kv: a page was not found by shelf"),
        (Operation.GET, "pool kv: a page was not read back by shelf"),
        (Operation.DELETE, "pool kv: a page was not dropped by shelf"),
    ],
)
@pytest.mark.parametrize("integrity", ["auto", "off"])
def test_the_self_test_says_what_failed(
    operation: Operation, said: str, integrity: str
) -> None:
    shelf = Shelf()

    def fail(batch: Batch) -> BatchResult | None:
        if batch.operation is not operation:
            return None
        # A get that lies: success, and nothing was loaded.
        lies = operation is Operation.GET
        return BatchResult.all(batch, Outcome.OK if lies else Outcome.ABSENT)

    shelf.trouble = fail
    with pytest.raises(AttachError, match=said):
        Engine([shelf], core=patient(self_test=True, integrity=integrity))
    assert shelf.released == ["kv"]


def test_a_page_that_a_store_still_keeps_from_being_dropped_is_no_fault() -> None:
    shelf = Shelf()
    left_s = []

    def leased(batch: Batch) -> BatchResult | None:
        if batch.operation is not Operation.DELETE:
            return None
        left_s.append(batch.deadline_s - time.monotonic())
        return BatchResult.all(batch, Outcome.REFUSED)

    shelf.trouble = leased
    with Engine([shelf], core=patient(self_test=True)).attachment as cache:
        *_, last = cache.self_test()
        assert last.ok
        assert "not dropped by shelf, which keeps" in last.what
        # It is asked once and not waited for: leases last longer than that.
        assert all(one <= 2.0 for one in left_s)


def test_absent_keys_are_asked_for_again_unless_that_was_switched_off() -> None:
    for absent, asked in (("0 s", 2), ("10 s", 1)):
        engine = Engine(core=patient(negative_cache={"absent_ttl": absent}))
        with engine.attachment as cache:
            cache.exists(hashes(3))
            cache.exists(hashes(3))
            assert len(engine.shelf.calls) == asked
            engine.fill(hashes(3), range(3))
            cache.put(hashes(3), engine.where(range(3)))
            assert cache.exists(hashes(3)).best == 3


def test_clearing_gets_through_again_once_the_store_is_back() -> None:
    engine = Engine(core=patient(breaker={"failures": 1, "backoff": "20 ms"}))
    with engine.attachment as cache:
        engine.shelf.trouble = raising
        assert cache.clear() == {"shelf": Outcome.ERROR}
        assert cache.clear() == {"shelf": Outcome.UNAVAILABLE}
        engine.shelf.trouble = None
        until(lambda: cache.clear() == {"shelf": Outcome.OK})


def test_a_call_that_is_never_begun_releases_what_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, go_on, ends = Engine(core=patient()), threading.Event(), list[str]()
    run = Job.run

    def late(job: Job) -> object:
        assert go_on.wait(60)
        return run(job)

    with engine.attachment as cache, monkeypatch.context() as patched:
        patched.setattr(Job, "run", late)
        pool = cache["kv"]
        batch = Batch(
            Operation.EXISTS, ["key"], deadline_s=time.monotonic() + 0.01, pool="kv"
        )
        use = MemoryUse(lambda: ends.append("over"))
        ran = pool.channel.call(pool.handle, batch, use=use)
        assert ran.outcomes.tolist() == [Outcome.TIMEOUT]
        assert ends == []
        go_on.set()
        assert cache.wait_idle(60)
        assert ends == ["over"]
