"""Stores around stores, chosen by `wrap`."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from plugins_of_objects import (
    ALL,
    POOL,
    Full,
    Functions,
    Objects,
    Plain,
    attach,
    loaded,
    lookup,
)
from shelf import Engine, Shelf, attention, hashes

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.dock import Dock
from kvdock.errors import PluginError, SettingsError
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import Candidate
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Manifest, Support
from kvdock.plugin.store import PoolStore, StoreWrapper
from kvdock.plugin.wrapper import build_wrappers, find_wrapper, wrapped_plugin
from kvdock.pools.shard import Shard
from kvdock.wrappers.faults import Fault, FaultInjector, FaultSettings

FOLDER = Candidate(
    name="reference_folder",
    value="reference:folder",
    distribution="tests",
    version="0",
)


class Noted(StoreWrapper):
    """Notes what passes."""

    def __init__(self, inner: PoolStore, notes: list[str]) -> None:
        super().__init__(inner)
        self.notes = notes

    def run(self, batch: Batch) -> BatchResult:
        self.notes.append(str(batch.operation))
        return self.inner.run(batch)

    def touch(self, keys: object) -> None:
        self.notes.append("touch")
        inner: Any = self.inner
        inner.touch(keys)


@attrs.define
class Notes:
    """The wrapper of those stores."""

    found: list[str] = attrs.field(factory=list)

    def manifest(self, inner: Manifest) -> Manifest:
        return attrs.evolve(inner, zero_copy=Support.EMULATED)

    def wrap(self, inner: Any, pool: Any, region: Any, config: Any) -> PoolStore:
        del pool, config
        return Noted(inner.open(region), self.found)


def wrapped(plugin: object, *notes: Notes) -> tuple[Backend, Any]:
    around = [("notes", one) for one in notes]
    backend = Backend(wrapped_plugin(loaded(plugin, "obj").plugin, around))
    region: Any = None
    return backend, backend.register_pool(POOL, region, AttachConfig())


def test_a_wrapper_that_knows_all_members_fits_around_any_store() -> None:
    for store, declared in ((Plain(), {}), (Full(), ALL)):
        backend, handle = wrapped(Objects(store, **declared), Notes())
        assert bool(backend.manifest.touch) == bool(declared)
        assert backend.batch_io(handle, lookup()).ok.all()
        handle.close()
        assert store.calls[-1] == "close"


class Stranger:
    """A wrapper that knows nothing of kvdock but the members of a store."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.batches = inner, 0

    def run(self, batch: Any) -> Any:
        self.batches += 1
        return self.inner.run(batch)

    def close(self) -> None:
        self.inner.close()

    def touch(self, keys: Any) -> None:
        self.inner.touch(keys)

    def removed(self, limit: int) -> Any:
        return self.inner.removed(limit)

    def capacity(self) -> Any:
        return self.inner.capacity()

    @property
    def peers(self) -> Any:
        return self.inner.peers


def test_a_strangers_wrapper_needs_nothing_but_the_members_of_a_store() -> None:
    class Strange(Notes):
        def wrap(self, inner: Any, pool: Any, region: Any, config: Any) -> Any:
            del pool, config
            return Stranger(inner.open(region))

    for store, declared in ((Plain(), {}), (Full(), ALL)):
        backend, handle = wrapped(Objects(store, **declared), Strange())
        assert backend.batch_io(handle, lookup()).ok.all()
        assert handle.batches == 1
        if declared:
            handle.touch(["a"])
            assert handle.removed(3) == ["gone-3"]
            assert handle.peers.endpoint() == b"here"
        handle.close()
        assert store.calls[-1] == "close"


def test_the_store_is_called_through_all_wrappers_and_closed_once() -> None:
    store, inner, outer = Full(), Notes(), Notes()
    backend, handle = wrapped(Objects(store, **ALL), inner, outer)
    assert backend.calls_stores
    backend.batch_io(handle, lookup())
    handle.touch(["a"])
    assert inner.found == outer.found == ["exists", "touch"]
    assert handle.removed(2) == ["gone-2"]
    assert handle.peers.endpoint() == b"here"
    one = np.ones((1, 1), np.int64)
    send = Batch(Operation.SEND, ["0"], one, one, remote=one, peer="peer")
    assert not backend.batch_io(handle, send).ok.any()
    handle.close()
    assert store.calls[-1] == "close"
    assert store.calls.count("close") == 1


def test_a_plugin_that_does_its_batches_in_a_hook_is_wrapped_as_well() -> None:
    notes = Notes()
    backend, handle = wrapped(Functions(Full(), **ALL), notes)
    # `Functions` asserts that it is handed what it returned.
    assert not backend.batch_io(handle, lookup()).ok.any()
    handle.close()
    assert notes.found == ["exists"]
    assert backend.manifest.zero_copy is Support.EMULATED
    one = np.ones((1, 1), np.int64)
    send = Batch(Operation.SEND, ["0"], one, one, remote=one, peer="peer")
    assert backend.batch_io(handle, send).outcomes.tolist() == [Outcome.ABSENT]


def test_a_route_says_what_is_wrapped() -> None:
    shelf, notes = Shelf(), Notes()
    plugin = wrapped_plugin(shelf.backend().plugin, [("notes", notes)])
    dock = Dock({"shelf": Backend(plugin)})
    (route,) = dock.plan([attention()], Shard()).routes
    assert "wrapped by notes" in route.reason
    assert "zero_copy" in route.reason or "zero copy" in route.reason


def test_a_store_that_a_wrapper_spoils_is_named() -> None:
    class Less(Notes):
        def wrap(self, *_: object, **__: object) -> PoolStore:
            return Plain()

    with pytest.raises(PluginError, match=r"declares touch.*Plain.*'touch'"):
        wrapped(Objects(Full(), **ALL), Less())


def test_faults_are_chosen_by_settings_and_shown_by_the_route() -> None:
    wrap = ["faults", {"name": "faults", "kinds": ["drop"], "rate": 1}]
    given: dict[str, dict[str, object]] = {
        "near": {"plugin": "reference_folder", "root": "/x", "wrap": wrap}
    }
    dock = Dock.of([FOLDER]).with_instances(given)
    assert dock.backends["near"].plugin.wrapped_by == ("faults", "faults")
    assert dock.backends["reference_folder"].plugin.wrapped_by == ()
    plan = dock.plan([attention()], Shard(), ["near"], settings=given)
    assert "wrapped by faults, faults" in plan.explain()
    assert dock.backends["near"].settings(given["near"]).root is not None


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        ("fault", r"no wrapper 'fault'.*Did you mean 'faults'"),
        (3, "wrap is 3, and not a list"),
        ([3], "wrap names 3"),
        ([{"rate": 1}], r"wrap names \{'rate': 1\}"),
        ([{"name": "faults", "rat": 1}], r"wrapper 'faults'.*'rat'"),
    ],
)
def test_a_wrapper_that_cannot_be_used_is_refused(wrap: object, said: str) -> None:
    with pytest.raises((PluginError, SettingsError), match=said):
        build_wrappers(wrap, where="backends.near")


def test_a_text_names_several_wrappers() -> None:
    built = build_wrappers("faults, faults", where="x")
    assert [name for name, _ in built] == ["faults", "faults"]
    assert find_wrapper("faults").summary


def test_observers_see_what_the_wrapper_answers() -> None:
    faults = FaultInjector(FaultSettings(kinds=(Fault.DROP,)))
    engine = Engine(faults=faults)
    with engine.attachment as cache:
        engine.fill(hashes(1), [0])
        moved = cache.put(hashes(1), engine.where([0]))
        assert moved.outcomes["kv"].tolist() == [Outcome.ERROR]
    assert attach(Objects(Plain()))[0].plugin.wrapped_by == ()
