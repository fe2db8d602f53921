from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from shelf import (
    Engine,
    Shelf,
    attention,
    draft,
    hashes,
    hasty,
    indexer,
    patient,
    states,
    until,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import CoreSettings, Integrity, StagingPolicy
from kvdock.dock import Dock
from kvdock.errors import AttachError, KvdockError, RegionError
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.plugin.manifest import Support
from kvdock.pools.enums import Layout
from kvdock.pools.factories import logical
from kvdock.pools.shard import Shard
from kvdock.transfer.attachment import Attachment
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec


@pytest.mark.parametrize(
    ("integrity", "staging", "multi", "layout"),
    list(product(Integrity, StagingPolicy, (Support.NATIVE, Support.NO), Layout)),
)
def test_pages_come_back_byte_for_byte_whatever_the_way(
    integrity: Integrity, staging: StagingPolicy, multi: Support, layout: Layout
) -> None:
    core = patient(integrity=integrity, calls={"staging": staging, "batch_pages": 3})
    pools = [attention(layout=layout), draft(), indexer(), states()]
    engine = Engine([Shelf(multi_buffer=multi)], pools, core)
    with engine.attachment as cache:
        names = hashes(8)
        engine.fill(names, range(8))
        stored = cache.put(names, engine.where(range(8)))
        assert stored.pages == 8
        engine.blank()
        assert cache.exists(names).best == 8
        pages = [15, 9, 20, 8, 11, 19, 23, 10]
        loaded = cache.get(names, engine.where(pages))
        assert loaded.pages == 8
        for pool in pools:
            for name, page in zip(names, pages, strict=True):
                assert engine.holds(pool.name, name, page)
    assert engine.shelf.released == ["mamba", "indexer", "draft", "kv"]


def test_no_staged_page_lies_in_memory_that_the_backend_was_told_of() -> None:
    core = patient(calls={"staging": "always"})
    engine = Engine([Shelf()], core=core)
    with engine.attachment:
        mine = engine.memory["kv"]
        for block in engine.shelf.regions["kv"].blocks:
            first, last = mine.ctypes.data, mine.ctypes.data + mine.nbytes
            assert block.address + block.nbytes <= first or block.address >= last


def test_the_anchor_is_stored_last_and_only_over_its_required_sidecars() -> None:
    engine = Engine(pools=[attention(), states()], core=patient())

    def lose_a_state(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.PUT and batch.pool == "mamba":
            return BatchResult.of(batch, [0, Outcome.REFUSED, 0])
        return None

    engine.shelf.trouble = lose_a_state
    with engine.attachment as cache:
        names = hashes(3)
        engine.fill(names, range(3))
        stored = cache.put(names, engine.where(range(3)))
        assert stored.pages == 1
        assert stored.outcomes["kv"].tolist() == [0, Outcome.ABSENT, 0]
        order = [call.pool for call in engine.shelf.calls]
        assert order == ["mamba", "kv"]


def test_sidecars_are_read_only_as_far_as_the_anchor_was() -> None:
    engine = Engine(pools=[attention(), indexer()], core=patient())
    with engine.attachment as cache:
        names = engine.store(6)
        for key in list(engine.shelf.objects):
            if f"/{names[2]}.kv" in key:
                del engine.shelf.objects[key]
        engine.shelf.calls.clear()
        loaded = cache.get(names, engine.where(range(6)))
        assert loaded.pages == 2
        assert [len(call) for call in engine.shelf.calls] == [6, 2]


@pytest.mark.parametrize("staging", list(StagingPolicy))
@pytest.mark.parametrize("damage", ["flip", "cut", "extend", "swap", "trailer"])
def test_damage_in_the_store_is_a_miss_and_is_dropped(
    staging: StagingPolicy, damage: str
) -> None:
    engine = Engine(core=patient(calls={"staging": staging}))
    with engine.attachment as cache:
        names = engine.store(3)
        objects = engine.shelf.objects
        first, second, _ = objects
        stored = objects[second]
        objects[second] = {
            "flip": stored[:5] + bytes([stored[5] ^ 1]) + stored[6:],
            "cut": stored[:-7],
            "extend": stored[:9] + stored,
            "swap": objects[first],
            "trailer": stored[:-40] + bytes(40),
        }[damage]
        engine.blank()
        loaded = cache.get(names, engine.where(range(3)))
        assert loaded.pages == 1
        assert loaded.outcomes["kv"][1] == Outcome.CORRUPT
        assert engine.holds("kv", names[0], 0)
        # The third page is right; it is the prefix that ends before it.
        assert loaded.outcomes["kv"][2] == Outcome.OK
        until(lambda: second not in objects)
        # Believed dead for a while, without another question.
        engine.shelf.calls.clear()
        assert cache.exists(names).best == 1
        assert all(second not in call.keys for call in engine.shelf.calls)
        # Stored again, it is found again.
        engine.fill(names, range(3))
        assert cache.put(names, engine.where(range(3))).pages == 3
        assert cache.exists(names).best == 3


@pytest.mark.parametrize("ends", [True, False], ids=["in time", "too late"])
def test_a_page_is_stored_anew_once_its_wrong_object_is_gone(*, ends: bool) -> None:
    """Or the deletion would take away what was stored in its place."""
    go_on = threading.Event()
    engine = Engine(core=hasty("put") if not ends else patient())

    def hold_deletions(batch: Batch) -> None:
        if batch.operation is Operation.DELETE:
            go_on.wait(60)

    with engine.attachment as cache:
        names = engine.store(3)
        objects = engine.shelf.objects
        _, second, _ = objects
        objects[second] = bytes(len(objects[second]))
        engine.shelf.trouble = hold_deletions
        cache.get(names, engine.where(range(3, 6)))
        until(lambda: any(c.operation is Operation.DELETE for c in engine.shelf.calls))
        timer = threading.Timer(0.05, go_on.set)
        if ends:
            timer.start()
        stored = cache.put(names, engine.where(range(3)))
        second_is = Outcome.OK if ends else Outcome.REFUSED
        assert stored.outcomes["kv"].tolist() == [Outcome.OK, second_is, Outcome.OK]
        go_on.set()
        assert cache.wait_idle(60)
        assert (second in objects) is ends
        found = cache.get(names, engine.where(range(6, 9)))
        assert found.pages == (3 if ends else 1)
        assert cache.put(names, engine.where(range(3))).pages == 3


def test_a_backend_that_reports_success_without_bytes_is_caught() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        names = engine.store(2)
        # The pages and their trailers in memory are right from before: a
        # trailer that is left there must prove nothing.
        engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.OK)
        assert cache.get(names, engine.where(range(2))).pages == 0


def test_a_page_that_is_stored_under_two_names_gets_both() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        names = hashes(2)
        engine.fill(names[:1], [5])
        assert cache.put(names, engine.where([5, 5])).pages == 2
        assert cache.get(names, engine.where([6, 7])).pages == 2
        assert np.array_equal(*engine.rows("kv", [6, 7]))


@pytest.mark.parametrize("batch_pages", [1, 8])
def test_one_page_cannot_be_filled_twice_at_once(batch_pages: int) -> None:
    engine = Engine(core=patient(calls={"batch_pages": batch_pages}))
    with engine.attachment as cache:
        names = engine.store(2)
        loaded = cache.get(names, engine.where([3, 3]))
        assert loaded.outcomes["kv"].tolist() == [0, Outcome.REFUSED]
        assert engine.holds("kv", names[0], 3)


MARKS = logical("kv", page_tokens=4, anchor=True)


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("anchor", [attention(), MARKS], ids=["kv", "marks"])
def test_a_backend_gets_no_more_keys_at_once_than_it_takes(
    limit: int, anchor: PoolSpec
) -> None:
    pools = [anchor, indexer()]
    engine = Engine([Shelf(max_batch_keys=limit)], pools, core=patient())
    with engine.attachment as cache:
        names = engine.store(7)
        assert cache.exists(names).best == 7
        assert cache.get(names, engine.where(range(8, 15))).pages == 7
        assert max(map(len, engine.shelf.calls)) == limit
        kv = cache.pools_by_name["kv"]
        kv.channel.background.delete_corrupt(
            kv.handle, "kv", list(engine.shelf.objects)
        )
        assert cache.wait_idle(60)
        assert max(map(len, engine.shelf.calls)) == limit
        assert not engine.shelf.objects


def test_the_pools_can_be_named_while_another_thread_closes() -> None:
    engine = Engine(core=patient(), pools=(attention(), draft()))
    backends = engine.attachment._backends

    class Closing(dict[str, Any]):
        def values(self) -> Any:
            for attached in super().values():
                yield attached
                backends.close(0.0)

    object.__setattr__(backends, "pools", Closing(backends.pools))
    assert [pool.name for pool in engine.attachment.pools] == ["kv", "draft"]
    assert engine.attachment.close()


@pytest.mark.parametrize(
    ("native", "asked"),
    [(Support.NO, Integrity.OFF), (Support.NATIVE, Integrity.ALWAYS)],
)
def test_a_plan_made_for_another_choice_of_integrity_is_refused(
    native: Support, asked: Integrity
) -> None:
    """An explicit choice must not be lost between two calls."""
    dock = Dock({"shelf": Shelf(integrity=native).backend()})
    plan = dock.plan([attention()], Shard())
    memory = np.zeros((2, attention().page_bytes(Shard())), np.uint8)
    regions = {"kv": Region.of(attention(), Shard(), [memory], 2)}
    core = CoreSettings(integrity=asked)
    with pytest.raises(AttachError, match=f"core.integrity is {asked}") as raised:
        Attachment.open(dock, plan, Namespace(model="m"), regions, core=core)
    assert "RouteRequirements" in raised.value.fix


@pytest.mark.parametrize("first", [Support.NATIVE, Support.NO])
def test_pages_of_before_are_misses_when_trailers_come_or_go(first: Support) -> None:
    """Installing or losing an oracle costs a store its pages, never its sense."""
    then = Support.NO if first else Support.NATIVE
    names = hashes(3)
    before = Engine([Shelf(integrity=first)])
    before.fill(names, range(3))
    assert before.attachment.put(names, before.where(range(3))).pages == 3
    before.attachment.close()
    after = Engine([Shelf(integrity=then, objects=before.shelf.objects)])
    after.shelf.strict = True
    with after.attachment as cache:
        after.blank()
        assert cache.get(names, after.where(range(3))).pages == 0
        after.fill(names, range(3))
        assert cache.put(names, after.where(range(3))).pages == 3
        after.blank()
        assert cache.get(names, after.where(range(5, 8))).pages == 3
        assert all(after.holds("kv", name, 5 + at) for at, name in enumerate(names))


@pytest.mark.parametrize(
    ("planned", "described"),
    [pair for pair in product(Layout, Layout) if pair[0] is not pair[1]],
)
def test_memory_described_in_another_layout_than_planned_is_refused(
    planned: Layout, described: Layout
) -> None:
    """Its objects have as many bytes, in another order: a permuted page."""
    dock = Dock({"shelf": Shelf().backend()})
    plan = dock.plan([attention(layout=planned)], Shard())
    pool = attention(layout=described)
    memory = np.zeros((2, pool.page_bytes(Shard())), np.uint8)
    regions = {"kv": Region.of(pool, Shard(), [memory], 2)}
    with pytest.raises(AttachError) as raised:
        Attachment.open(dock, plan, Namespace(model="m"), regions)
    assert raised.value.what == (
        f"pool 'kv' was planned in layout {planned}, but its memory was described "
        f"in {described}"
    )


@pytest.mark.parametrize("staging", list(StagingPolicy))
def test_a_backend_is_told_the_layout_of_the_pool(staging: StagingPolicy) -> None:
    core = patient(calls={"staging": staging})
    engine = Engine([Shelf()], [attention(layout=Layout.PAGE_HEAD)], core)
    with engine.attachment:
        assert engine.shelf.regions["kv"].layout is Layout.PAGE_HEAD


@pytest.mark.parametrize("staging", list(StagingPolicy))
def test_an_engine_may_move_its_pools_one_by_one(staging: StagingPolicy) -> None:
    core = patient(calls={"staging": staging})
    engine = Engine(pools=[attention(), indexer()], core=core)
    names = hashes(4)
    with engine.attachment as cache:
        later = time.monotonic() + 5
        engine.fill(names, range(4))
        some = [0, NO_PAGE, 2, 3]
        stored = cache["indexer"].put(names, some, later).tolist()
        assert stored == [0, Outcome.ABSENT, 0, 0]
        assert cache["indexer"].exists(names, later).tolist() == [1, 0, 1, 1]
        assert not cache["kv"].exists(names, later).any()
        engine.blank()
        loaded = cache["indexer"].get(names[2:], [7, 6], later)
        assert not loaded.any()
        assert engine.holds("indexer", names[2], 7)
        assert engine.holds("indexer", names[3], 6)
        with pytest.raises(KvdockError, match="Did you mean 'indexer'"):
            cache["indexr"].exists(names, later)
        with pytest.raises(RegionError, match="2,"):
            cache["kv"].get(names, [0, 1], later)
        past = time.monotonic() - 1
        assert cache["kv"].put(names, range(4), past).all()


@pytest.mark.parametrize("staging", StagingPolicy)
def test_never_is_a_deadline_like_any_other(staging: StagingPolicy) -> None:
    engine = Engine(core=patient(calls={"staging": staging}))
    names, never = hashes(4), float("inf")
    with engine.attachment as cache:
        engine.fill(names, range(4))
        assert not cache["kv"].put(names, range(4), never).any()
        assert cache["kv"].exists(names, never).all()
        assert not cache["kv"].get(names, range(4), never).any()
        assert cache.leases("kv").wait(range(4), never)
        assert cache.wait_idle(never)
        assert cache.close(never)


def test_one_pool_takes_the_deadlines_of_the_settings_unless_given_one() -> None:
    engine = Engine(core=patient(deadlines={"exists": "9 s", "put": "8 s"}))
    names = hashes(2)
    with engine.attachment as cache:
        engine.fill(names, range(2))
        began = time.monotonic()
        assert not cache["kv"].put(names, range(2)).any()
        assert cache["kv"].exists(names).all()
        cache["kv"].exists(names, began + 77)
        left = [one.deadline_s - began for one in engine.shelf.calls]
        assert left == pytest.approx([8, 9, 77], abs=0.9)


@pytest.mark.parametrize("deadline", ["soon", float("nan")])
def test_what_is_no_deadline_is_refused_and_holds_no_page(deadline: Any) -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        for move in (cache["kv"].get, cache["kv"].put):
            with pytest.raises(KvdockError, match="a deadline is a number"):
                move(hashes(2), [0, 1], deadline)
        with pytest.raises(KvdockError, match="a deadline is a number"):
            cache["kv"].exists(hashes(2), deadline)
        assert not cache.leases("kv").in_use([0, 1]).any()


def test_bad_input_is_refused_by_name() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        with pytest.raises(RegionError, match="'kw', which is not"):
            cache.put(hashes(1), {"kw": [0]})
        with pytest.raises(RegionError, match="outside of its 24 pages"):
            cache.get(hashes(1), {"kv": [24]})
        with pytest.raises(RegionError, match="for 2 hashes"):
            cache.get(hashes(2), {"kv": [NO_PAGE]})
        with pytest.raises(RegionError, match="page indices must have one dimension"):
            cache.get(hashes(2), {"kv": [[0], [1, 2]]})
        with pytest.raises(KvdockError, match="letters and digits"):
            cache.exists(["../x"])
        with pytest.raises(KvdockError, match="'kw' is not attached"):
            cache.leases("kw")


@pytest.mark.parametrize("pages", [[0.5, 1.5], [True, False], ["0", "1"], [None, None]])
def test_only_whole_numbers_are_page_indices(pages: Any) -> None:
    with Engine(core=patient()).attachment as cache:
        for call in (cache.put, cache.get):
            with pytest.raises(RegionError, match="whole numbers"):
                call(hashes(2), {"kv": pages})
        for move in (cache["kv"].put, cache["kv"].get):
            with pytest.raises(RegionError, match="whole numbers"):
                move(hashes(2), pages, time.monotonic() + 5)


@pytest.mark.parametrize("page", [2**63, 2**64 - 2, 2**64 - 1])
def test_an_index_beyond_int64_is_outside_and_not_no_page(page: int) -> None:
    given = {"kv": np.array([0, page], np.uint64)}
    with Engine(core=patient()).attachment as cache:
        for call in (cache.put, cache.get):
            with pytest.raises(RegionError, match=f"page index {page} is outside"):
                call(hashes(2), given)
        for move in (cache["kv"].put, cache["kv"].get):
            with pytest.raises(RegionError, match=f"page index {page} is outside"):
                move(hashes(2), given["kv"], time.monotonic() + 5)
        for ask in (cache.leases("kv").in_use, lambda p: cache.leases("kv").wait(p, 0)):
            for wrong in (given["kv"], [0, -1], [0, 24], [0.5], [True]):
                with pytest.raises(RegionError, match="page ind"):
                    ask(wrong)


def test_indices_in_memory_that_cannot_be_read_are_rejected() -> None:
    class OnADevice:  # as a tensor in a GPU's memory
        def __array__(self, *_: object, **__: object) -> None:
            raise TypeError("can't convert device memory")

    with (
        Engine(core=patient()).attachment as cache,
        pytest.raises(RegionError, match="page indices must have one dimension"),
    ):
        cache.put(hashes(2), {"kv": cast("Any", OnADevice())})


def test_a_generator_of_hashes_is_rejected_before_anything_is_stored() -> None:
    with Engine(core=patient()).attachment as cache:
        pages = {"kv": [0, 1]}
        calls: list[Callable[[Any], object]] = [
            cache.exists,
            lambda given: cache.put(given, pages),
            lambda given: cache.get(given, pages),
            lambda given: cache["kv"].exists(given, time.monotonic() + 5),
            lambda given: cache["kv"].put(given, [0, 1], time.monotonic() + 5),
            lambda given: cache["kv"].get(given, [0, 1], time.monotonic() + 5),
        ]
        for call in calls:
            with pytest.raises(KvdockError, match="page hashes are a row"):
                call(name for name in hashes(2))
        assert cache.exists(hashes(2)).best == 0


@pytest.mark.parametrize("staging", StagingPolicy)
def test_an_attached_pool_says_what_is_stored_where(staging: StagingPolicy) -> None:
    shelf = Shelf()
    engine = Engine([shelf], core=patient(calls={"staging": staging}))
    with engine.attachment as cache:
        engine.fill(hashes(2), range(2))
        cache["kv"].put(hashes(2), range(2))
        assert cache["kv"].backend == "shelf"
        assert sorted(cache["kv"].keys(hashes(2))) == sorted(shelf.objects)
        stored = len(next(iter(shelf.objects.values())))
        assert cache["kv"].object_bytes.tolist() == [stored]
