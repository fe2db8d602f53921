"""A pool that is kept in tiers: what is found, loaded, stored and copied where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
from shelf import (
    ENDED_S,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    held_by,
    patient,
    states,
    until,
)
from tiered import NAMES, Tiers

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.errors import AttachError
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from kvdock.pools.shard import Shard
from kvdock.transfer.manager import TransferManager

if TYPE_CHECKING:
    from kvdock.geometry.region import Region
    from kvdock.pools.spec import PoolSpec
    from kvdock.tiers.chain import Chain
    from kvdock.tiers.shared_loads import SharedLoads

Make = Callable[..., Tiers]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Tiers] = []

    def build(*rules: str | Mapping[str, object], **more: object) -> Tiers:
        names = [one if isinstance(one, str) else str(one["backend"]) for one in rules]
        shelves = more.pop("shelves", None) or [Shelf(name) for name in names]
        made.append(Tiers(shelves, tiers=rules, **more))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        for shelf in one.shelves:
            shelf.trouble = None
        one.cache.close()


def calls(shelf: Shelf, operation: Operation) -> int:
    return sum(batch.operation is operation for batch in shelf.calls)


def fails(outcome: Outcome) -> Callable[[Batch], BatchResult | None]:
    return lambda batch: BatchResult.all(batch, outcome)


def test_the_nearest_is_written_at_once_and_the_others_behind(make: Make) -> None:
    tiers = make("near", "disk", "far", pools=(attention(), states(), draft()))
    near, disk, far = tiers.shelves
    gate = threading.Event()

    disk.trouble = far.trouble = held_by(gate, "put")
    assert tiers.put() == len(NAMES)
    assert near.objects
    assert not disk.objects
    assert not far.objects
    gate.set()
    tiers.settle()
    assert near.objects == disk.objects == far.objects
    assert tiers.listener.count("copied") == 2 * 3 * len(NAMES)


def test_each_tier_gets_the_anchor_after_its_sidecars(make: Make) -> None:
    tiers = make("near", "disk", "far", pools=(attention(), states()))
    for number in range(4):
        tiers.put(hashes(2, 10 * number), [0, 1])
    tiers.settle()
    for shelf in tiers.shelves:
        stored: dict[str, list[str]] = {}
        for batch in shelf.calls:
            if batch.operation is Operation.PUT:
                for key in batch.keys:
                    page = key.split("/")[1][:64]
                    stored.setdefault(page, []).append(batch.pool)
        assert len(stored) == 8
        assert all(pools == ["mamba", "kv"] for pools in stored.values())


def test_an_anchor_without_its_sidecar_is_not_copied(make: Make) -> None:
    tiers = make("near", "far", pools=(attention(), states()))
    far = tiers.shelves[1]
    far.trouble = lambda batch: (
        BatchResult.all(batch, Outcome.REFUSED)
        if batch.pool == "mamba" and batch.operation is Operation.PUT
        else None
    )
    tiers.stored()
    assert not far.objects
    assert tiers.listener.count("incomplete") == len(NAMES)
    far.trouble = None
    # Of one page another host has stored the sidecar meanwhile.
    near = tiers.shelves[0].objects
    far.objects.update({key: near[key] for key in near if f"{NAMES[0]}.mamba" in key})
    tiers.put()  # stored near already, and behind it is tried once more
    tiers.settle()
    assert len(far.objects) == 2 * len(NAMES)


def test_a_lookup_asks_the_next_tier_only_for_the_rest(make: Make) -> None:
    tiers = make("near", "far")
    near, far = tiers.shelves
    tiers.stored()
    far.calls.clear()
    assert tiers.cache.exists(NAMES).best == len(NAMES)
    assert tiers.get() == len(NAMES)
    assert far.calls == []
    for key in [key for key in near.objects if NAMES[4] in key]:
        del near.objects[key]
    assert tiers.cache.exists(NAMES).best == len(NAMES)
    (asked,) = far.calls
    assert all(NAMES[4] in key for key in asked.keys)


def test_a_load_asks_first_where_the_lookup_before_it_found_a_page(make: Make) -> None:
    tiers = make("near", "disk", "far")
    near, disk, far = tiers.shelves
    tiers.stored()
    for shelf in (near, disk):
        for key in [key for key in shelf.objects if NAMES[0] not in key]:
            del shelf.objects[key]
    assert tiers.cache.exists(NAMES).best == len(NAMES)
    for shelf in tiers.shelves:
        shelf.calls.clear()
    assert tiers.get() == len(NAMES)
    assert [calls(shelf, Operation.GET) for shelf in tiers.shelves] == [1, 0, 1]
    # It is a hint: what is gone there meanwhile comes from wherever it is.
    tiers.settle()
    assert tiers.cache.exists(NAMES).best == len(NAMES)
    disk.objects.update(far.objects)
    far.objects.clear()
    assert tiers.get() == len(NAMES)


def test_a_copy_comes_from_another_tier_where_its_source_lost_the_page(
    make: Make,
) -> None:
    tiers = make("near", "disk", "far")
    near, disk, far = tiers.shelves
    gate = threading.Event()
    far.trouble = held_by(gate, "exists")
    tiers.put()
    until(lambda: tiers.listener.count("copied") == len(NAMES))
    near.objects.clear()
    gate.set()
    tiers.settle()
    assert far.objects == disk.objects
    assert tiers.listener.count("gone") == 0


def test_what_was_used_twice_is_promoted_and_what_was_used_once_is_not(
    make: Make,
) -> None:
    tiers = make("near", "far")
    near, far = tiers.shelves
    tiers.stored()
    assert tiers.get() == len(NAMES), "which is no use of a far page"
    near.objects.clear()
    assert tiers.get() == len(NAMES)
    tiers.settle()
    assert not near.objects
    assert tiers.get(NAMES[:2], [0, 1]) == 2
    tiers.settle()
    assert sorted(near.objects) == sorted(
        key for key in far.objects if NAMES[0] in key or NAMES[1] in key
    )
    promoted = [one for one in tiers.listener.copies if one.promoted]
    assert [(one.source, one.target) for one in promoted] == [("far", "near")]


@pytest.mark.parametrize(("rule", "uses"), [("always", 1), ("never", 0)])
def test_promotion_follows_the_tiers_rule(make: Make, rule: str, uses: int) -> None:
    tiers = make({"backend": "near", "promote": rule}, "far")
    near, _ = tiers.shelves
    tiers.stored()
    near.objects.clear()
    for _ in range(uses or 3):
        assert tiers.get() == len(NAMES)
        tiers.settle()
    assert bool(near.objects) is bool(uses)


def test_nothing_is_copied_from_a_damaged_page(make: Make) -> None:
    tiers = make("near", "far")
    near, far = tiers.shelves
    gate = threading.Event()

    far.trouble = held_by(gate, "exists")
    tiers.put()
    (bad,) = [key for key in near.objects if NAMES[1] in key]
    near.objects[bad] = near.objects[bad][::-1]
    gate.set()
    tiers.settle()
    assert tiers.listener.count("gone") == 1
    assert len(far.objects) == len(NAMES) - 1
    assert bad not in far.objects


def test_a_full_far_tier_hurts_no_call(make: Make) -> None:
    tiers = make("near", "far")
    tiers.shelves[1].trouble = fails(Outcome.REFUSED)
    tiers.stored()
    assert tiers.get() == len(NAMES)
    assert tiers.listener.count("failed") == len(NAMES)


def test_copies_that_find_the_queue_full_are_dropped_and_counted(make: Make) -> None:
    page_bytes = attention().page_bytes(Shard())
    core = patient(tiers={"queue_bytes": 8 * page_bytes})
    tiers = make("near", "far", core=core)
    gate = threading.Event()
    tiers.shelves[1].trouble = held_by(gate)
    assert tiers.put() == len(NAMES)
    assert tiers.put(hashes(6, 50)) == 6
    assert tiers.listener.count("dropped") == 6
    gate.set()
    tiers.settle()
    assert len(tiers.shelves[1].objects) == len(NAMES)


FAR = {"backend": "far", "locality": "remote"}


def _shared(chain: Chain) -> SharedLoads:
    found = chain.shared[0]
    assert found
    return found


def test_a_tier_of_this_host_is_read_into_the_pages_of_the_engine(make: Make) -> None:
    tiers = make({"backend": "near", "promote": "never"}, "far")
    near, far = tiers.shelves
    tiers.stored(NAMES[:2], [0, 1])
    near.objects.clear()
    far.calls.clear()
    assert tiers.get(NAMES[:2], [4, 5]) == 2
    loaded = [one for one in far.calls if one.operation is Operation.GET]
    addresses, _ = tiers.cache["kv"].region.addresses([4, 5])
    assert [one.addresses[:, :1].tolist() for one in loaded] == [addresses.tolist()]


def test_one_far_page_that_many_ask_for_is_loaded_once(make: Make) -> None:
    tiers = make({"backend": "near", "promote": "never"}, FAR)
    near, far = tiers.shelves
    tiers.stored(NAMES[:2], [0, 1])
    near.objects.clear()
    gate, waiting = threading.Event(), threading.Barrier(5)

    far.trouble = held_by(gate, "get")
    far.calls.clear()

    def load(caller: int) -> int:
        waiting.wait(60)
        return tiers.get(NAMES[:2], [4 * caller, 4 * caller + 1])

    with ThreadPoolExecutor(5) as callers:
        found = [callers.submit(load, caller) for caller in range(5)]
        chain = tiers.cache["kv"]._chain
        assert chain
        under_way = _shared(chain)._under_way
        # The first one, and each other one for each of two pages.
        until(lambda: {load.users for load, _ in under_way.copy().values()} == {9})
        gate.set()
        assert [one.result(60) for one in found] == [2] * 5
    asked = [key for batch in far.calls if batch.operation is Operation.GET
             for key in batch.keys]  # fmt: skip
    assert sorted(asked) == sorted(set(asked)), "a page was loaded twice"


def test_a_shared_load_that_fails_fails_for_all_and_is_tried_again(make: Make) -> None:
    tiers = make({"backend": "near", "promote": "never"}, FAR)
    near, far = tiers.shelves
    tiers.stored()
    near.objects.clear()
    far.trouble = fails(Outcome.ERROR)
    assert tiers.get() == 0
    far.trouble = None
    assert tiers.get() == len(NAMES)


def test_what_fails_for_one_that_loads_fails_for_those_that_wait(make: Make) -> None:
    tiers = make({"backend": "near", "promote": "never"}, FAR)
    near, far = tiers.shelves
    tiers.stored(NAMES[:2], [0, 1])
    near.objects.clear()
    gate = threading.Event()

    def fail_later(batch: Batch) -> BatchResult | None:
        if batch.operation is not Operation.GET:
            return None
        assert gate.wait(60)
        return BatchResult.all(batch, Outcome.ERROR)

    far.trouble = fail_later
    chain = tiers.cache["kv"]._chain
    assert chain
    under_way = _shared(chain)._under_way
    with ThreadPoolExecutor(3) as callers:
        found = [
            callers.submit(tiers.get, NAMES[:2], [4 * caller, 4 * caller + 1])
            for caller in range(3)
        ]
        until(lambda: {load.users for load, _ in under_way.copy().values()} == {5})
        gate.set()
        assert [one.result(60) for one in found] == [0] * 3
    assert not under_way


def test_no_page_is_delivered_after_its_deadline(make: Make) -> None:
    tiers = make("near", "far")
    pool = tiers.cache["kv"]
    tiers.memory["kv"][:] = 0xEE
    late = pool._deliver(np.array([0, 1]), np.array([0, 1]), time.monotonic() - 1)
    assert late.tolist() == [Outcome.TIMEOUT] * 2
    assert (tiers.memory["kv"] == 0xEE).all()
    assert not pool.leases.in_use([0, 1]).any()


def test_near_hits_cost_nothing_beside_a_far_tier_that_hangs(make: Make) -> None:
    core = hasty(tiers={"lookup": "100 ms"})
    tiers = make("near", "far", core=core)
    near, far = tiers.shelves
    tiers.stored()
    release = threading.Event()
    far.trouble = held_by(release)
    try:
        far.calls.clear()
        asked = [*NAMES, *hashes(2, 90)]
        began = time.monotonic()
        for _ in range(12):
            assert tiers.cache.exists(asked).best == len(NAMES)
        breaker = tiers.cache.breakers()["far"][Operation.EXISTS]
        assert breaker == "open"
        assert time.monotonic() - began < ENDED_S
        engine_calls = len(far.calls)
        for _ in range(50):
            assert tiers.cache.exists(NAMES).best == len(NAMES)
            assert tiers.get() == len(NAMES)
        assert calls(far, Operation.GET) == 0
        assert calls(near, Operation.GET) >= 50
        assert len(far.calls) - engine_calls < 50, "only probes go there"
    finally:
        release.set()


def test_a_tier_that_hangs_takes_its_share_of_the_time_only(make: Make) -> None:
    tiers = make("near", "far")
    tiers.stored()
    hangs: list[float] = []

    def hang(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.GET:
            hangs.append(batch.remaining_s())
        return BatchResult.all(batch, Outcome.TIMEOUT)

    tiers.shelves[0].trouble = hang
    assert tiers.get() == len(NAMES)
    assert hangs
    assert max(hangs) <= tiers.cache.core.deadlines.get / 2


def test_a_background_load_goes_on_to_the_next_tier_when_the_nearest_hangs(
    make: Make,
) -> None:
    # Staged, so that the load that hangs keeps no page.
    tiers = make("near", "far", core=patient(calls={"staging": "always"}))
    tiers.stored()
    release = threading.Event()
    with TransferManager(tiers.cache) as manager:
        tiers.shelves[0].trouble = held_by(release, "get")
        future = manager.read("kv", NAMES, range(6), timeout_s=1.0)
        until(lambda: future.ended)
        loaded = future.outcomes.tolist()
        release.set()
        assert manager.drain(60)
        assert loaded == [Outcome.OK] * len(NAMES)
        assert all(tiers.holds("kv", name, at) for at, name in enumerate(NAMES))


def test_a_far_answer_that_comes_too_late_leaves_the_near_one(make: Make) -> None:
    core = patient(tiers={"lookup": "50 ms"})
    tiers = make("near", "far", core=core)
    near, far = tiers.shelves
    tiers.stored()
    for key in [key for key in near.objects if NAMES[3] in key]:
        del near.objects[key]
    release = threading.Event()
    far.trouble = held_by(release)
    try:
        began = time.monotonic()
        assert tiers.cache.exists(NAMES).best == 3
        assert time.monotonic() - began < ENDED_S
    finally:
        release.set()


def test_what_is_loaded_while_tiers_are_cleared_is_not_promoted_again(
    make: Make,
) -> None:
    tiers = make({"backend": "near", "promote": "always"}, "far")
    near, far = tiers.shelves
    tiers.stored()

    def load_once_more(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.CLEAR:  # near is cleared by now
            assert tiers.get() == len(NAMES)
        return None

    far.trouble = load_once_more
    assert tiers.cache.clear() == {"near": Outcome.OK, "far": Outcome.OK}
    tiers.settle()
    assert not near.objects
    assert tiers.listener.count("dropped") == len(NAMES)
    far.trouble = None
    tiers.put()  # copies are made again
    tiers.settle()
    assert len(far.objects) == len(NAMES)


def test_a_load_that_is_interrupted_leaves_its_memory_to_others(make: Make) -> None:
    tiers = make("near", FAR)
    chain = tiers.cache["kv"]._chain
    assert chain
    free = _shared(chain)._chunks._free
    before = len(free)

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _shared(chain).load(NAMES, time.monotonic() + 60, interrupt, interrupt)
    assert len(free) == before
    assert not _shared(chain)._under_way


def test_closing_makes_the_copies_that_wait(make: Make) -> None:
    tiers = make("near", "far")
    far = tiers.shelves[1]
    gate = threading.Event()
    far.trouble = held_by(gate)
    tiers.put()
    tiers.put(hashes(6, 50))
    threading.Timer(0.1, gate.set).start()
    assert tiers.cache.close()
    assert len(far.objects) == 2 * len(NAMES)


def test_closing_beside_a_far_tier_that_hangs_ends_in_time(make: Make) -> None:
    core = hasty("put", "get", "exists", "close")
    tiers = make("near", "far", core=core)
    release = threading.Event()
    tiers.shelves[1].trouble = held_by(release)
    try:
        tiers.put()
        began = time.monotonic()
        tiers.cache.close()
        assert time.monotonic() - began < ENDED_S
    finally:
        release.set()


def test_touches_reach_each_tier_that_orders_by_use(make: Make) -> None:
    tiers = make("near", "far")
    touched: list[object] = []

    def touch(handle: object, pages: int, keys: Callable[[], Sequence[str]]) -> bool:
        assert len(keys()) == pages
        touched.append(handle)
        return True

    for placement in tiers.cache["kv"].placements:
        placement.channel.background.touch = touch  # type: ignore[method-assign]
    assert tiers.cache["kv"].touch(NAMES)
    assert len(touched) == 2


class Refused(Shelf):
    """Takes no pool."""

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> NoReturn:
        del pool, region, config
        raise AttachError("the mount is gone")


def test_a_far_tier_that_cannot_be_opened_leaves_the_others(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    far = Refused("far")
    tiers = make("near", "far", shelves=[Shelf("near"), far])
    assert [one.backend for one in tiers.cache["kv"].placements] == ["near"]
    assert "goes without its tier far" in caplog.text
    assert tiers.put() == len(NAMES)
    assert tiers.get() == len(NAMES)


def test_without_its_nearest_tier_a_pool_is_not_attached(make: Make) -> None:
    with pytest.raises(AttachError, match="the mount is gone"):
        make("near", "far", shelves=[Refused("near"), Shelf("far")])
