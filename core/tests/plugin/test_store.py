"""What `kvdock_register_pool` returns, held against the manifest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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

from kvdock.batch import Batch, Operation
from kvdock.errors import PluginError
from kvdock.keys import key_suffixes
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Support
from kvdock.plugin.store import MAX_ENDPOINT_BYTES, endpoint_of
from kvdock.pools.shard import Shard


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


def test_the_hooks_of_a_listing_are_the_plugins_own() -> None:
    own = attach(Objects(Full(), **ALL))[0].plugin.implemented
    assert own == {"kvdock_manifest", "kvdock_register_pool"}
    more = attach(Functions(Plain()))[0].plugin.implemented - own
    assert more == {"kvdock_batch_io", "kvdock_key_suffix"}


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
