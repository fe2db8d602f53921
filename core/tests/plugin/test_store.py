"""A plugin's handle may be an object: the core then answers what it leaves out."""

from __future__ import annotations

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
    lookup,
)

from kvdock.batch import Batch, Operation
from kvdock.capacity import Capacity
from kvdock.errors import PluginError
from kvdock.keys import key_suffixes
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import Support
from kvdock.plugin.validation import ContractViolation
from kvdock.pools.shard import Shard


def test_a_manifest_and_a_store_are_a_whole_plugin() -> None:
    store = Plain()
    backend, handle = attach(Objects(store))
    assert handle is store
    assert backend.key_suffix(POOL, Shard()) == tuple(key_suffixes(POOL, Shard()))
    assert backend.batch_io(handle, lookup()).ok.all()
    backend.release(handle)
    assert store.calls[1:] == ["close"]
    assert not backend.touches
    assert not backend.tracks_removal
    assert backend.capacity(handle) is None


def test_what_is_declared_is_asked_of_the_store() -> None:
    store = Full()
    backend, handle = attach(Objects(store, **ALL))
    assert backend.touches
    assert backend.tracks_removal
    backend.touch(handle, ["a"])
    assert store.calls == [("touch", ("a",))]
    assert backend.removed(handle, 5) == ("gone-5",)
    assert backend.capacity(handle) == Capacity(3, 7)
    assert backend.endpoint(handle) == b"here"
    assert backend.connect(handle, b"there", 1.0) == (b"there", 1.0)
    assert backend.disconnect(handle, "peer")
    assert not backend.disconnect(handle, "another")
    assert backend.withdraw(handle)


def test_rows_for_a_peer_go_to_the_memory_of_peers() -> None:
    store = Full()
    backend, handle = attach(Objects(store, **ALL))
    one = np.ones((1, 1), np.int64)
    batch = Batch(Operation.SEND, ["0"], one, one, remote=one, peer="peer")
    assert not backend.batch_io(handle, batch).ok.any()
    assert store.calls == ["send"]


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
    with pytest.raises(PluginError, match=r"dict.* run.*kvdock_batch_io"):
        attach(Objects({}))
    with pytest.raises(PluginError, match="NoneType"):
        attach(Objects(None))


class OwnHooks(Objects):
    """A plugin that answers some hooks itself, with None."""

    @hookimpl
    def kvdock_release(self, handle: object) -> None:
        """Leave the store open: another pool has it as well."""

    @hookimpl
    def kvdock_capacity(self, handle: object) -> None:
        """Answer None: it is not known."""


def test_a_plugins_own_none_is_its_answer() -> None:
    store = Plain()
    backend, handle = attach(OwnHooks(store))
    assert backend.capacity(handle) is None
    backend.release(handle)
    assert store.calls == []


def test_a_plugin_with_hooks_of_its_own_is_handed_what_it_returned() -> None:
    backend, handle = attach(Functions({}))
    assert not backend.batch_io(handle, lookup()).ok.any()
    backend.release(handle)
    # Its handles may be anything, also what looks like a store.
    backend, full = attach(Functions(Full()))
    backend.release(full)
    assert full.calls == []
    assert not backend.touches


def test_functions_that_declare_peers_have_the_hooks_for_them() -> None:
    with pytest.raises(ContractViolation, match="kvdock_endpoint"):
        attach(Functions({}, peers=Support.NATIVE))


def test_the_hooks_of_a_listing_are_those_that_are_answered() -> None:
    hooks = attach(Objects(Full(), **ALL))[0].plugin.implemented
    assert {"kvdock_batch_io", "kvdock_touch", "kvdock_withdraw"} <= hooks
    assert "kvdock_touch" not in attach(Objects(Plain()))[0].plugin.implemented
