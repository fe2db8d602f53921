"""How objects are stored, and which of them are evicted together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock import Operation, Outcome
from kvdock.errors import PluginError
from kvdock_mooncake.library import Library, Wheel
from kvdock_mooncake.preconditions import REQUIRED, check_library
from kvdock_mooncake.put_options import PutOptions, groups_of
from kvdock_mooncake.settings import MooncakeSettings, Pin

STORE = SimpleNamespace(get_hostname=lambda: "here:1")
NEW = {"group_ids", "preferred_segment", "preferred_segments", "soft_pin_ttl_ms"}


def release(*put_options: str, soft_pin: object = "ENABLE") -> Library:
    """A release of the library whose record of how to store has these fields."""
    return Library(
        wheel=Wheel("mooncake-transfer-engine-non-cuda", "0"),
        store_class=None,
        put_config_class=SimpleNamespace,
        setup_parameters=frozenset(),
        put_options=frozenset(put_options),
        methods=REQUIRED,
        soft_pin=soft_pin,
    )


def fields(library: Library, keys: tuple[str, ...] = (), **given: Any) -> Any:
    settings = MooncakeSettings(master="h:1", **given)
    check_library(library, settings)
    return vars(PutOptions.of(library, settings, STORE).config(keys))


def test_all_objects_of_a_page_are_one_group() -> None:
    keys = ("ns/aa.kv.L0-4", "ns/aa.draft.L0-1.H0-2", "ns/bb.kv.L0-4")
    assert fields(release(*NEW), keys)["group_ids"] == ["ns/aa", "ns/aa", "ns/bb"]
    assert "group_ids" not in fields(release(*NEW)), "a warm-up has no page"
    long = [f"{'ab' * 32}/{page * 64}.{pool}" for page in "cd" for pool in ("kv", "d")]
    first, same, *others = groups_of(long)
    assert first == same == f"{'ab' * 8}/{'c' * 24}"
    assert others == [f"{'ab' * 8}/{'d' * 24}"] * 2
    assert "group_ids" not in fields(release(), keys), "an older release"


def test_a_list_of_segments_keeps_its_order_and_knows_the_own_one() -> None:
    several = fields(release(*NEW), preferred_segment=["self", "h:2", "h:3"])
    assert several["preferred_segments"] == ["here:1", "h:2", "h:3"]
    assert "preferred_segment" not in several
    text = fields(release(*NEW), preferred_segment=" h:2 , self,")
    assert text["preferred_segments"] == ["h:2", "here:1"]
    assert fields(release(), preferred_segment="h:2")["preferred_segment"] == "h:2"


def test_a_soft_pin_lasts_as_long_as_was_asked_for() -> None:
    soft = fields(release(*NEW), pin=Pin.SOFT, soft_pin_ttl_s="90 s")
    assert (soft["soft_pin_action"], soft["soft_pin_ttl_ms"]) == ("ENABLE", 90_000)
    assert "soft_pin_ttl_ms" not in fields(release(*NEW), pin=Pin.SOFT)
    old = release(soft_pin=None)
    assert fields(old, pin=Pin.SOFT)["with_soft_pin"]
    with pytest.raises(PluginError, match="no lifetimes of soft pins"):
        fields(old, pin=Pin.SOFT, soft_pin_ttl_s="90 s")


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_put_uses_the_first_preferred_segment_that_is_there(
    attached: Any, alone: MooncakeSettings, serve: Any, start_peer: Any
) -> None:
    master = serve().address
    start_peer(master=master, segment_bytes="64 MiB")
    own = attrs.evolve(
        alone,
        master=master,
        preferred_segment="127.0.0.1:1,self",
        pin=Pin.SOFT,
        soft_pin_ttl_s=60.0,
    )
    rig = attached(own)
    names = [f"placed-{i}" for i in range(8)]
    assert rig.put(names) == [Outcome.OK] * 8
    more = [f"more-{i}" for i in range(8)]
    assert rig.put(more) == [Outcome.OK] * 8
    names += more
    keys = [rig.key(name) for name in names]
    placed = {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for replicas in rig.store.batch_get_replica_desc(keys).values()
        for replica in replicas
    }
    assert len(placed) == 1, "at random they would lie in both segments"
    rig.release()


@pytest.mark.mooncake
def test_the_pools_of_a_page_are_evicted_together(
    attached: Any, serve: Any, start_peer: Any
) -> None:
    """Also where only one of them has been read lately."""
    pages, each = 300, 20
    master = serve("-default_kv_lease_ttl=200")
    start_peer(master=master.address, segment_bytes="64 MiB")
    settings = MooncakeSettings(
        master=master.address, segment_bytes=0, lease_s=0.2, full_wait_s=5.0
    )
    pools = {
        "kv": attached(settings, rows=each, row_bytes=256 << 10),
        "draft": attached(settings, rows=each, row_bytes=64 << 10),
    }

    def run(pool: str, operation: Operation, numbers: range) -> Any:
        rig = pools[pool]
        batch = rig.batch(operation, numbers)
        keys = [key.replace(".kv.", f".{pool}.") for key in batch.keys]
        return rig.handle.run(attrs.evolve(batch, keys=keys)).ok

    for start in range(0, pages, each):
        for pool in pools:
            assert run(pool, Operation.PUT, range(start, start + each)).all()
        run("kv", Operation.GET, range(each))
    there = {pool: run(pool, Operation.EXISTS, range(pages)) for pool in pools}
    both = there["kv"] & there["draft"]
    assert 100 < np.count_nonzero(both) < pages
    assert np.array_equal(there["kv"], there["draft"])
    for rig in pools.values():
        rig.release()
