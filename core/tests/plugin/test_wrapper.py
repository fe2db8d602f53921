"""Stores around stores, chosen by `wrap`."""

from __future__ import annotations

from types import SimpleNamespace
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
from shelf import Shelf, attention

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.dock import Dock
from kvdock.errors import PluginError, SettingsError
from kvdock.keys import key_suffixes
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import Candidate
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Manifest, Support
from kvdock.plugin.store import MAX_ENDPOINT_BYTES, PoolStore, StoreWrapper, endpoint_of
from kvdock.plugin.wrapper import build_wrappers, wrapped_plugin
from kvdock.pools.shard import Shard

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


def test_a_manifest_and_a_store_are_a_whole_plugin() -> None:
    store = Plain()
    backend, handle = attach(Objects(store))
    assert handle is store
    assert backend.key_suffix(POOL, Shard()) == tuple(key_suffixes(POOL, Shard()))
    assert backend.batch_io(handle, lookup()).ok.all()


@pytest.mark.parametrize("answer", ["here", None, bytes(MAX_ENDPOINT_BYTES + 1)])
def test_an_endpoint_that_is_none_is_an_error_that_names_the_backend(
    answer: object,
) -> None:
    memory: Any = SimpleNamespace(endpoint=lambda: answer)
    with pytest.raises(PluginError, match=r"endpoint\(\) of obj returned"):
        endpoint_of(memory, "obj")


@pytest.mark.parametrize("capability", ALL)
def test_what_the_store_lacks_is_an_error_that_names_both(capability: str) -> None:
    store = Plain()
    with pytest.raises(PluginError, match=rf"'obj'.*Plain.*'{capability}'"):
        attach(Objects(store, **{capability: Support.NATIVE}))
    assert store.calls == ["close"], "what was opened stays open"


@pytest.mark.parametrize("capability", ALL)
def test_what_the_manifest_leaves_out_is_an_error_that_names_both(
    capability: str,
) -> None:
    declared = {name: grade for name, grade in ALL.items() if name != capability}
    with pytest.raises(PluginError, match=rf"Full.*'{capability}'.*'obj'"):
        attach(Objects(Full(), **declared))


def test_a_handle_that_runs_no_batch_is_refused() -> None:
    with pytest.raises(PluginError, match=r"dict.* run and no close"):
        attach(Objects({}))
    with pytest.raises(PluginError, match="NoneType"):
        attach(Objects(None))


def test_a_plugin_with_hooks_of_its_own_is_handed_what_it_returned() -> None:
    store = SimpleNamespace(close=list)
    backend, handle = attach(Functions(store))
    assert not backend.batch_io(handle, lookup()).ok.any()
    with pytest.raises(PluginError, match="has no close"):
        attach(Functions({}))


def test_a_pool_over_the_declared_limit_is_rejected_before_the_plugin_sees_it() -> None:
    """Whatever its route was planned with: a limit that is declared holds."""
    store = Plain()
    backend = loaded(Objects(store, max_object_bytes=10), "obj")
    for nbytes in (10, 11):
        region: Any = SimpleNamespace(object_bytes=np.array([1, nbytes]))
        if nbytes == 10:
            found: object = backend.register_pool(POOL, region, AttachConfig())
            assert found is store
            continue
        with pytest.raises(PluginError, match="has 11 bytes, and obj takes 10 at most"):
            backend.register_pool(POOL, region, AttachConfig())
