from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from shelf import (
    Engine,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    held_by,
    patient,
    until,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.dock import Dock
from kvdock.errors import AttachError, PluginError, SettingsError
from kvdock.events import BatchEnded, CallsBehind, Origin, PagesRestored, PoolRouted
from kvdock.observers.metrics import (
    MANY_PAGES,
    MOST_MODELS,
    OTHER_MODELS,
    Metrics,
)
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer, find_observer
from kvdock.pools.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

    from kvdock.events import Event
    from kvdock.plugin.backend import Backend


def measured(**more: Any) -> tuple[Engine, CollectorRegistry]:
    registry = CollectorRegistry()
    engine = Engine(observers=[Metrics(registry)], **{"core": patient(), **more})
    return engine, registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the one sample with these labels, of whatever rank and model."""
    found = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else None


BATCH = {"backend": "shelf", "pool": "kv"}


def test_a_pool_that_is_stored_and_found_and_never_restored_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = CollectorRegistry()
    metrics, origin = Metrics(registry), Origin(rank="0", model="m")

    def ended(operation: Operation, keys: int, outcome: Outcome = Outcome.OK) -> None:
        event = BatchEnded(
            backend="shelf",
            pool="kv",
            operation=operation,
            outcomes={outcome: keys},
            nbytes=0,
            seconds=0.0,
        )
        metrics.kvdock_observe(event=event, origin=origin)

    def flag() -> float | None:
        return value(registry, "kvdock_never_restored", pool="kv")

    ended(Operation.PUT, MANY_PAGES)
    ended(Operation.EXISTS, MANY_PAGES, Outcome.ABSENT)
    ended(Operation.EXISTS, MANY_PAGES - 1)
    assert not flag()
    for _ in range(3):
        ended(Operation.EXISTS, 1)
    assert flag() == 1
    assert caplog.text.count("none was ever restored") == 1
    ended(Operation.GET, 1, Outcome.CORRUPT)
    assert flag() == 1
    ended(Operation.GET, 1)
    assert flag() == 0
    ended(Operation.PUT, 2 * MANY_PAGES)
    ended(Operation.EXISTS, 2 * MANY_PAGES)
    assert flag() == 0
    assert len(caplog.records) == 1


def test_keys_are_counted_by_how_they_ended_for_the_engine() -> None:
    engine, registry = measured()
    with engine.attachment as cache:
        names = engine.store(3)
        damaged = next(iter(engine.shelf.objects))
        engine.shelf.objects[damaged] = bytes(len(engine.shelf.objects[damaged]))
        cache.get(names, engine.where(range(3)))
        # The backend called all three a success.
        get = {**BATCH, "operation": "get"}
        assert value(registry, "kvdock_keys_total", **get, outcome="ok") == 2
        assert value(registry, "kvdock_keys_total", **get, outcome="corrupt") == 1
        page = attention().page_bytes(engine.shard)
        assert value(registry, "kvdock_bytes_total", **get) == 2 * page
        assert value(registry, "kvdock_batch_seconds_count", **get) == 1


def test_what_never_comes_back_through_the_hook_is_counted_as_well() -> None:
    engine, registry = measured(core=hasty("get", "exists"))
    go_on = threading.Event()

    with engine.attachment as cache:
        engine.shelf.trouble = held_by(go_on)
        for _ in range(3):
            cache.get(hashes(1), engine.where([0]))
            cache.exists(hashes(1))
        exists = {**BATCH, "operation": "exists"}
        assert value(registry, "kvdock_keys_total", **exists, outcome="timeout") == 2
        assert (
            value(registry, "kvdock_keys_total", **exists, outcome="unavailable") == 1
        )
        assert (
            value(registry, "kvdock_breaker_state", backend="shelf", operation="exists")
            == 2
        )
        assert value(registry, "kvdock_calls_behind", backend="shelf") == 3
        assert value(registry, "kvdock_pool_pages", pool="kv", state="leased") == 1
        go_on.set()
        assert cache.wait_idle(60)
        assert value(registry, "kvdock_calls_behind", backend="shelf") == 0
        assert value(registry, "kvdock_pool_pages", pool="kv", state="leased") == 0


def test_series_name_the_rank_and_the_model() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    origin = Origin.of(Shard(tp_rank=1, tp_size=2), "org/model", "0" * 64)
    event = PoolRouted(pool="kv", backend="", enabled=False, reason="no backend")
    metrics.kvdock_observe(event, origin)
    labels = {"rank": "tp1", "model": "org/model", "pool": "kv"}
    assert registry.get_sample_value("kvdock_pool_enabled", labels) == 0
    labels = {"rank": "tp1", "model": "org/model", "digest": "0" * 64}
    assert registry.get_sample_value("kvdock_config_info", labels) == 1


def test_the_models_of_a_process_stay_few() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for number in range(MOST_MODELS + 5):
        event = CallsBehind(backend="shelf", calls=number)
        metrics.kvdock_observe(event, Origin(model=f"model-{number}"))
    (gauge,) = [one for one in registry.collect() if one.name == "kvdock_calls_behind"]
    assert len(gauge.samples) == MOST_MODELS + 1
    assert value(registry, "kvdock_calls_behind", model=OTHER_MODELS)


def test_what_only_an_adapter_knows_is_told_once_however_many_backends_there_are() -> (
    None
):
    two = [Shelf("one"), Shelf("two")]
    engine, registry = measured(
        shelves=two, pools=[attention(), draft()], overrides={"draft": "two"}
    )
    with engine.attachment as cache:
        cache.notify(PagesRestored(pages={"kv": 3}, target=3, draft=0))
        cache.notify(PagesRestored(pages={"draft": 2}, target=0, draft=2))
        ratio = value(registry, "kvdock_draft_restored_ratio")
    assert value(registry, "kvdock_restored_prefix_pages_total") == 3
    assert value(registry, "kvdock_restored_pages_total", pool="draft") == 2
    assert ratio == pytest.approx(2 / 3)


class Measured(Shelf):
    """A shelf that knows how full it is, as long as it is asked nicely."""

    answer: Any = Capacity(100, 400)

    def capacity(self, pool: str) -> Capacity:
        del pool
        return cast("Capacity", self.answer)


def test_how_full_a_store_is_is_asked_between_batches() -> None:
    engine, registry = measured(shelves=[Measured()])
    with engine.attachment as cache:
        cache.exists(hashes(1))
        assert cache.wait_idle(60)
        labels = {"backend": "shelf"}
        assert value(registry, "kvdock_store_bytes", **labels, state="used") == 100
        assert value(registry, "kvdock_store_bytes", **labels, state="limit") == 400


@pytest.mark.parametrize("answer", [None, "full", (1, 2)])
def test_a_store_that_does_not_know_how_full_it_is_costs_nothing(answer: Any) -> None:
    shelf = Measured()
    shelf.answer = answer
    engine, registry = measured(shelves=[shelf])
    with engine.attachment as cache:
        cache.exists(hashes(1))
        assert cache.wait_idle(60)
        (gauge,) = [
            one for one in registry.collect() if one.name == "kvdock_store_bytes"
        ]
        assert not gauge.samples
        assert set(cache.breakers()["shelf"].values()) == {"closed"}


def test_a_store_that_hangs_when_asked_how_full_it_is_is_asked_once() -> None:
    go_on = threading.Event()
    asked = []

    class Hanging(Shelf):
        def capacity(self, pool: str) -> None:
            asked.append(pool)
            go_on.wait(60)

    calls = {"capacity_interval": "0 s"}
    engine, _ = measured(shelves=[Hanging()], core=patient(calls=calls))
    with engine.attachment as cache:
        names = engine.store(1)
        until(lambda: len(asked) == 1)
        for _ in range(5):
            assert cache.get(names, engine.where([1])).pages == 1
        assert len(asked) == 1
        go_on.set()
        assert cache.wait_idle(60)


def test_the_share_of_restored_prefixes_that_have_their_draft_is_kept() -> None:
    engine, registry = measured(pools=[attention(), draft()])
    with engine.attachment as cache:
        names = engine.store(4)
        for key in [key for key in engine.shelf.objects if ".draft" in key][:3]:
            del engine.shelf.objects[key]
        assert cache.get(names, engine.where(range(4))).pages == 4
        assert value(registry, "kvdock_restored_prefix_pages_total") == 4
        assert value(registry, "kvdock_restored_draft_pages_total") == 1
        assert value(registry, "kvdock_draft_restored_ratio") == 0.25
        assert value(registry, "kvdock_restored_pages_total", pool="draft") == 1


@attrs.frozen
class Clumsy:
    """An observer that fails at everything."""

    how: type[BaseException]

    @hookimpl
    def kvdock_observe(self, event: Event) -> None:
        raise self.how(f"cannot take {type(event).__name__}")


@pytest.mark.parametrize("how", [ValueError, SystemExit])
def test_an_observer_that_fails_costs_a_line_in_the_log(
    how: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(observers=[Clumsy(how)], core=patient())
    with engine.attachment:
        engine.store(1)
    assert caplog.text.count("an observer failed") == 1


def test_settings_of_an_observer_that_is_not_switched_on_are_refused() -> None:
    dock = Dock({"shelf": Shelf().backend()})
    with pytest.raises(SettingsError, match=r"'tracin',.*Did you mean 'tracing'"):
        dock.observe(["tracing"], {"tracin": {"rate": 1}})
    with pytest.raises(SettingsError, match=r"'metrics',.*Add 'metrics' to core"):
        dock.observe(["tracing"], {"metrics": {}})
    assert dock.backends["shelf"].observers == ()


def test_observers_are_put_around_all_or_none_and_once() -> None:
    dock = Dock({"shelf": Shelf().backend()})
    with pytest.raises(PluginError, match="no observer 'nonsense'"):
        dock.observe(["tracing", "nonsense"])
    assert not dock.backends["shelf"].observers
    dock.observe(["tracing", "tracing"])
    assert dock.backends["shelf"].observers == ("tracing",)
    with pytest.raises(
        PluginError, match="'tracing' is around backend 'shelf' already"
    ):
        dock.observe(["metrics", "tracing"])
    assert dock.backends["shelf"].observers == ("tracing",)


class Answering:
    @hookimpl
    def kvdock_batch_io(self, batch: Batch) -> BatchResult:
        return BatchResult.all(batch, Outcome.OK)


class Misspelt:
    @hookimpl(wrapper=True)
    def kvdock_batchio(self) -> Generator[None, object, object]:
        return (yield)


class Deaf:
    @hookimpl
    def kvdock_observe(self, evnt: Event) -> None:
        del evnt


class Folded:
    @hookimpl(wrapper=True)
    def kvdock_observe(self) -> Generator[None, object, object]:
        return (yield)


class Flat:
    @hookimpl(wrapper=True)
    def kvdock_batch_io(self) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Answering, "'kvdock_batch_io' would answer in the place of a backend"),
        (Misspelt, "unknown hook 'kvdock_batchio'.*Did you mean 'kvdock_batch_io'"),
        (Deaf, "takes 'evnt'.*Did you mean 'event'"),
        (Folded, "nothing to wrap"),
        (Flat, "PluginValidationError"),
    ],
)
def test_an_observer_that_does_more_than_to_wrap_and_to_listen_is_refused(
    wrong: type, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Observer(name="mine", summary="", build=lambda _: wrong())
    found = {"tracing": find_observer("tracing"), "mine": mine}
    monkeypatch.setattr("kvdock.plugin.observer.find_observer", found.get)
    dock = Dock({"shelf": Shelf().backend()})
    with pytest.raises(PluginError, match=f"observer 'mine' cannot be used: .*{said}"):
        dock.observe(["tracing", "mine"])
    assert dock.backends["shelf"].observers == ()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("taken"), PluginError, r"'mine' .* ValueError: taken"),
        (SettingsError("port 1 is taken"), SettingsError, "^port 1 is taken$"),
    ],
)
def test_an_observer_that_cannot_be_built_says_why(
    error: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: object) -> object:
        raise error

    mine = Observer(name="mine", summary="", build=build)
    monkeypatch.setattr("kvdock.plugin.observer.find_observer", lambda _: mine)
    with pytest.raises(kind, match=said):
        Dock({"shelf": Shelf().backend()}).observe(["mine"])


class Observed(Shelf):
    """A shelf that an adapter has put observers around."""

    def backend(self) -> Backend:
        backend = super().backend()
        Dock({backend.name: backend}).observe(["tracing"])
        return backend


@pytest.mark.parametrize("observed", [False, True])
def test_only_an_observed_backend_is_called_through_the_relay(
    *, observed: bool
) -> None:
    files: list[str] = []

    def look(batch: Batch) -> None:
        del batch
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back

    engine = Engine([Observed() if observed else Shelf()], core=patient())
    with engine.attachment as cache:
        engine.shelf.trouble = look
        cache.exists(hashes(1))
        assert any("pluggy" in one for one in files) == observed
        assert files


def test_memory_is_not_attached_without_the_configured_observers() -> None:
    core = patient(observers=["tracing"])
    with pytest.raises(AttachError, match=r"'tracing'.*'shelf'.*dock\.observe"):
        Engine(core=core)
    with Engine([Observed()], core=core).attachment as cache:
        assert cache.exists(hashes(1)).best == 0


def test_an_engine_that_loads_pool_by_pool_tells_what_it_restored() -> None:
    engine, registry = measured(pools=[attention(), draft()])
    with engine.attachment as cache:
        names = engine.store(3)
        codes = cache["kv"].get(names, [4, 5, 6], time.monotonic() + 10)
        whole = codes == Outcome.OK
        cache.notify_restored({"kv": whole, "draft": np.array([True, False, True])}, 3)
        assert value(registry, "kvdock_restored_prefix_pages_total") == 3
        assert value(registry, "kvdock_restored_draft_pages_total") == 2
        cache.notify_restored({"kv": whole}, 3)
        assert value(registry, "kvdock_restored_prefix_pages_total") == 6
        assert value(registry, "kvdock_restored_draft_pages_total") == 2


def test_an_observer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"'metric'.*Did you mean 'metrics'"):
        find_observer("metric")
    with pytest.raises(SettingsError, match="unknown setting 'rat'"):
        Dock({}).observe(["metrics"], {"metrics": {"rat": 1}})


def test_faults_are_where_they_were_asked_for() -> None:
    from kvdock.wrappers.faults import Fault, FaultInjector, FaultSettings

    faults = FaultInjector(
        FaultSettings(
            kinds=(Fault.DROP,), operations=(Operation.GET,), pools=("kv",), rate=1.0
        )
    )
    engine = Engine(faults=faults, core=patient())
    with engine.attachment as cache:
        engine.store(2)
        moved = cache.get(hashes(2), engine.where([0, 1]))
        assert moved.outcomes["kv"].tolist() == [Outcome.ERROR] * 2
        assert faults.injected[Fault.DROP] == 1
