"""The hooks, as the core sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import Capability, Dock, PoolKind, PoolSpec, Shard, Support
from kvdock.pools import Part
from kvdock_mooncake import library, plugin
from kvdock_mooncake.library import Wheel
from kvdock_mooncake.settings import MooncakeSettings

if TYPE_CHECKING:
    import pytest

POOL = PoolSpec(
    name="kv",
    kind=PoolKind.MLA,
    parts=(Part("kv", "bf16", (64,)),),
    layers=(0, 1),
    page_tokens=16,
    anchor=True,
)


def test_the_plugin_loads_and_takes_every_kind_of_pool() -> None:
    manifest = Dock.load(require=["mooncake"]).backends["mooncake"].manifest
    assert set(manifest.kinds) == set(PoolKind)
    assert manifest.fork_safe is Support.NO
    assert manifest.memory_registration is Support.NATIVE


def test_without_its_library_it_is_refused_when_routing_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "installed", lambda: ())
    verdict = plugin.kvdock_check_capability(Capability.STORE, POOL, Shard(), None)
    assert verdict is not None
    assert not verdict
    assert "[cpu]" in verdict.reason


def test_with_its_library_the_manifest_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = Wheel("mooncake-transfer-engine-non-cuda", "0.3.13.post1")
    monkeypatch.setattr(library, "installed", lambda: (wheel,))
    for capability in set(Capability) - {Capability.HOST_ALLOCATOR}:
        assert plugin.kvdock_check_capability(capability, POOL, Shard(), None) is None


def test_only_a_standalone_client_reaches_no_memory_but_its_own() -> None:
    asked = (Capability.HOST_ALLOCATOR, POOL, Shard())
    for usual in (None, MooncakeSettings(), MooncakeSettings(master="127.0.0.1:1")):
        verdict = plugin.kvdock_check_capability(*asked, usual)
        assert verdict, "any memory will do"
    through = MooncakeSettings(standalone="127.0.0.1:1")
    assert plugin.kvdock_check_capability(*asked, through) is None
