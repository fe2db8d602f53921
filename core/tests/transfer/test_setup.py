"""What backends are told when memory is attached to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from shelf import Shelf, attention, draft

from kvdock.dock import Dock
from kvdock.errors import AttachError
from kvdock.namespace import Namespace
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from kvdock.pools.shard import Shard
from kvdock.region import Region
from kvdock.transfer.attachment import Attachment

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec

PAGES = 4


@attrs.define(eq=False)
class Listener(Shelf):
    """A shelf that keeps what it was told."""

    told: list[AttachConfig] = attrs.field(factory=list)

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> str:
        self.told.append(config)
        self.regions[pool.name] = region
        return pool.name


def told(process: str = "", *, trial: bool = False) -> list[AttachConfig]:
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
    return [config for one in listeners for config in one.told]


def test_every_backend_is_told_which_process_this_is_and_whether_it_is_a_trial() -> (
    None
):
    plain = told()
    assert {(one.process, one.trial) for one in plain} == {("", False)}
    named = told("dp1-tp0", trial=True)
    assert {(one.process, one.trial) for one in named} == {("dp1-tp0", True)}
    # A label is no part of what is stored.
    assert {one.namespace for one in plain} == {one.namespace for one in named}


def test_backends_share_nothing_with_each_other() -> None:
    first, second = told()
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
        told(label)
