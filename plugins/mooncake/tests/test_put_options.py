"""How objects are stored, and which of them are evicted together."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock import Operation, Outcome
from kvdock.errors import PluginError
from kvdock_mooncake.library import Library, Wheel
from kvdock_mooncake.preconditions import REQUIRED, check_library
from kvdock_mooncake.put_options import MOST_PIN_S, PutOptions, groups_of
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
    assert first == same == f"bab/{'c' * 8}"
    assert others == [f"bab/{'d' * 8}"] * 2
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


def test_a_promise_asked_for_is_a_soft_pin_of_that_time() -> None:
    def pin(library: Library, seconds: float, **given: Any) -> Any:
        settings = MooncakeSettings(master="h:1", **given)
        options = PutOptions.of(library, settings, STORE)
        return vars(options.config(("ns/aa.kv",), int(time.time() + seconds)))

    pinned = pin(release(*NEW), 600)
    assert pinned["soft_pin_action"] == "ENABLE"
    assert 590_000 < pinned["soft_pin_ttl_ms"] <= 600_000
    assert pin(release(*NEW), 1e6)["soft_pin_ttl_ms"] == MOST_PIN_S * 1000
    assert pin(release(*NEW), -60)["soft_pin_ttl_ms"] == 1, "0 is for ever, or usual"
    assert "soft_pin_action" not in pin(release(*NEW), 600, pin=Pin.HARD)
    assert "soft_pin_action" not in pin(release("group_ids"), 600), "no lifetimes"


@pytest.mark.mooncake
@pytest.mark.parametrize(
    "most_ms",
    [
        pytest.param(86_400_000, id="usual"),
        pytest.param(5_000, id="too-short", marks=pytest.mark.slow),
    ],
)
def test_pages_that_were_to_be_kept_are_evicted_last(
    attached: Any, serve: Any, settings: Any, most_ms: int
) -> None:
    """The master of a shorter -max_kv_soft_pin_ttl rejects the pin, not the page."""
    master = serve(
        "-default_kv_lease_ttl=100",
        "-default_kv_soft_pin_ttl=4000",
        f"-max_kv_soft_pin_ttl={most_ms}",
    )
    own = attrs.evolve(settings, master=master.address, segment_bytes=32 << 20)
    rig = attached(own, rows=4, row_bytes=1 << 20)
    try:
        rig.fill(22)
        kept, plain = (
            [f"{number}-{which}" for number in range(4)] for which in ("kept", "plain")
        )
        until_s = int(time.time()) + 600
        batch = attrs.evolve(rig.batch(Operation.PUT, kept), keep_until=until_s)
        assert rig.handle.run(batch).ok.all()
        assert rig.put(plain) == [Outcome.OK] * 4
        for number in range(0, 96, 4):
            rig.put([f"{number + i}-flood" for i in range(4)])
        assert rig.exists(plain).count(Outcome.OK) == 0
        assert (rig.exists(kept).count(Outcome.OK) == 4) is (most_ms > 600_000)
    finally:
        rig.release()


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


@pytest.mark.slow
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
