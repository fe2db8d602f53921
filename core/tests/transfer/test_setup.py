"""The configuration that backends get when memory is attached to them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from shelf import Heard, Shelf, ShelfPool, attention, draft

from kvdock.config.core import (
    CallSettings,
    CoreSettings,
    HostMemorySettings,
    StagingPolicy,
)
from kvdock.dock import Dock
from kvdock.errors import AttachError, PoolError
from kvdock.events import PluginLoaded
from kvdock.geometry.region import Region
from kvdock.models.memory_budget import HostBudget
from kvdock.namespace import Namespace
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from kvdock.pools.shard import Shard
from kvdock.transfer.attachment import Attachment

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec

PAGES = 4
GIB = 1 << 30


@attrs.define(eq=False)
class Listener(Shelf):
    """A shelf that records the configurations that it gets."""

    configs: list[AttachConfig] = attrs.field(factory=list)

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        self.configs.append(config)
        return super().kvdock_register_pool(pool, region, config)


def configs(process: str = "", *, trial: bool = False) -> list[AttachConfig]:
    listeners = [Listener(name=name) for name in ("first", "second")]
    dock = Dock({one.name: one.backend() for one in listeners})
    pools = [attention(), draft()]
    plan = dock.plan(pools, Shard(), overrides={"draft": "second"})
    regions = {
        pool.name: Region.of(
            pool,
            Shard(),
            [np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)],
            PAGES,
        )
        for pool in pools
    }
    Attachment.open(
        dock, plan, Namespace(model="m"), regions, process=process, trial=trial
    ).close()
    return [config for one in listeners for config in one.configs]


def test_every_backend_is_told_which_process_this_is_and_whether_it_is_a_trial() -> (
    None
):
    plain = configs()
    assert {(one.process, one.trial) for one in plain} == {("", False)}
    named = configs("dp1-tp0", trial=True)
    assert {(one.process, one.trial) for one in named} == {("dp1-tp0", True)}
    # A label is not part of what is stored.
    assert {one.namespace for one in plain} == {one.namespace for one in named}


def test_backends_share_nothing_with_each_other() -> None:
    first, second = configs()
    assert first.shared is not second.shared


def test_a_page_of_more_objects_than_the_backend_takes_at_once_is_refused() -> None:
    """The plan may have been made for another manifest of that backend."""
    pool = attention(head_group=1)
    wide = Dock({"shelf": Shelf(max_batch_keys=2).backend()})
    narrow = Dock({"shelf": Shelf(max_batch_keys=1).backend()})
    plan = wide.plan([pool], Shard())
    memory = np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    Attachment.open(wide, plan, Namespace(model="m"), regions).close()
    with pytest.raises(AttachError, match="2 objects a page") as raised:
        Attachment.open(narrow, plan, Namespace(model="m"), regions)
    assert "max_batch_keys" in raised.value.what


@pytest.mark.parametrize("label", ["..", ".x", "a/b", "a b", "a\n", "x" * 65])
def test_a_label_that_is_no_plain_name_is_refused(label: str) -> None:
    with pytest.raises(AttachError, match="the process is called"):
        configs(label)


@pytest.mark.parametrize("staging", [StagingPolicy.ROUTED, StagingPolicy.ALWAYS])
def test_memory_that_the_host_does_not_have_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, staging: StagingPolicy
) -> None:
    """The first pool's test page fits; what the second one needs does not."""
    listener = Listener()
    dock = Dock({listener.name: listener.backend()})
    pools = [attention(), draft()]
    plan = dock.plan(pools, Shard())
    regions = {
        pool.name: Region.of(
            pool,
            Shard(),
            [np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)],
            PAGES,
        )
        for pool in pools
    }
    reserves: list[int] = []
    left = 3 * 4096 if staging is StagingPolicy.ROUTED else 2 * 4096

    def measure(reserve_bytes: int) -> HostBudget:
        reserves.append(reserve_bytes)
        return HostBudget(reserve_bytes + left, "control group /job", reserve_bytes)

    monkeypatch.setattr(HostBudget, "measure", measure)
    core = CoreSettings(
        calls=CallSettings(staging=staging),
        host_memory=HostMemorySettings(reserve=1 << 20),
    )
    with pytest.raises(PoolError) as caught:
        Attachment.open(dock, plan, Namespace(model="m"), regions, core=core)
    named = "draft" if staging is StagingPolicy.ROUTED else attention().name
    assert caught.value.what.startswith(f"pool {named!r} does not fit")
    assert "control group /job has 1.0 MiB left, of which 1.0 MiB" in caught.value.what
    assert "core.calls.staging_buffers" in caught.value.fix
    assert reserves == [1 << 20]


def test_memory_for_pools_is_refused_where_the_host_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = Listener()
    dock = Dock({listener.name: listener.backend()})
    budget = HostBudget(GIB, "the machine", 0)
    monkeypatch.setattr(HostBudget, "measure", lambda _: budget)
    assert len(dock.allocate(listener.name, 4096, pool="kv").buffer) == 4096
    with pytest.raises(PoolError, match=r"pool 'kv' does not fit: kv 2\.0 GiB"):
        dock.allocate(listener.name, 2 * GIB, pool="kv")
    with pytest.raises(PoolError, match=r"memory for backend '.*' does not fit"):
        dock.allocate(listener.name, 2 * GIB)


def test_attaching_says_where_the_code_of_every_plugin_comes_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Heard(PluginLoaded)
    listeners = [Listener(name=name) for name in ("first", "second")]
    dock = Dock({one.name: one.backend() for one in listeners})
    dock.add_observer("hearer", heard)
    pool = attention()
    memory = [np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)]
    regions = {pool.name: Region.of(pool, Shard(), memory, PAGES)}
    with caplog.at_level("INFO", logger="kvdock"):
        Attachment.open(
            dock,
            dock.plan([pool], Shard(), ["first"]),
            Namespace(model="m"),
            regions,
            core=CoreSettings(observers=("hearer",)),
        ).close()
    configs = heard.events
    # Also those that no pool goes to: their code runs in this process too.
    assert [(one.kind, one.name) for one in configs] == [
        ("backend", "first"),
        ("backend", "second"),
        ("observer", "hearer"),
    ]
    plugin = listeners[0].backend().plugin
    assert configs[0].distribution == plugin.candidate.distribution
    assert configs[0].version == plugin.candidate.version
    assert configs[0].path == plugin.path
    assert configs[2].path == inspect.getfile(Heard)
    assert all(str(one) in caplog.messages for one in configs)


def test_settings_of_other_backends_may_stand_beside_those_of_the_plan() -> None:
    shelves = [Shelf(name=name) for name in ("first", "second")]
    dock = Dock({one.name: one.backend() for one in shelves})
    pool = attention()
    plan = dock.plan([pool], Shard(), ["first"])
    memory = [np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)]
    regions = {pool.name: Region.of(pool, Shard(), memory, PAGES)}

    def attach(name: str) -> None:
        given = {name: {"root": "/srv/kv"}}
        Attachment.open(dock, plan, Namespace(model="m"), regions, given).close()

    attach("second")
    with pytest.raises(AttachError, match=r"'scond', which is not installed") as why:
        attach("scond")
    assert "second" in why.value.fix
