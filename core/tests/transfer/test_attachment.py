from __future__ import annotations

import threading
from itertools import product
from typing import TYPE_CHECKING, Any

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
from kvdock.errors import AttachError
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.plugin.manifest import Support
from kvdock.pools.enums import Layout
from kvdock.pools.factories import logical
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import IntegrityCheck, TransferMode
from kvdock.transfer.attachment import Attachment

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


def test_a_lost_draft_page_costs_nothing_but_the_draft() -> None:
    engine = Engine(pools=[attention(), draft()], core=patient())
    with engine.attachment as cache:
        names = hashes(4)
        engine.fill(names, range(4))
        cache.put(names, engine.where(range(4)))
        gone = next(key for key in engine.shelf.objects if ".draft" in key)
        del engine.shelf.objects[gone]
        loaded = cache.get(names, engine.where(range(4)))
        assert loaded.pages == 4
        assert loaded.outcomes["draft"].tolist() == [Outcome.ABSENT, 0, 0, 0]


def test_sidecars_are_read_only_as_far_as_the_anchor_was() -> None:
    engine = Engine(pools=[attention(), indexer()], core=patient())
    with engine.attachment as cache:
        names = hashes(6)
        engine.fill(names, range(6))
        cache.put(names, engine.where(range(6)))
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
        names = hashes(3)
        engine.fill(names, range(3))
        cache.put(names, engine.where(range(3)))
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
        names = hashes(3)
        engine.fill(names, range(3))
        cache.put(names, engine.where(range(3)))
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
        names = hashes(2)
        engine.fill(names, range(2))
        cache.put(names, engine.where(range(2)))
        # The pages and their trailers in memory are right from before: a
        # trailer that is left there must prove nothing.
        engine.shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.OK)
        assert cache.get(names, engine.where(range(2))).pages == 0


def test_unverified_pages_are_an_explicit_choice_that_the_plan_shows() -> None:
    chosen = Engine(core=patient(integrity="off"))
    assert "UNVERIFIED by choice" in chosen.attachment.plan.explain()
    chosen.attachment.close()
    usual = Engine(core=patient())
    assert "verified by a trailer" in usual.attachment.plan.explain()
    usual.attachment.close()


def test_a_backend_of_single_buffers_gets_trailers_through_staging() -> None:
    pools = [attention(layout=Layout.LAYER_FIRST, kind="k_only")]
    engine = Engine([Shelf(multi_buffer=Support.NO)], pools, patient())
    route = engine.attachment.plan.anchor
    assert (route.mode, route.check) == (TransferMode.STAGED, IntegrityCheck.TRAILER)
    engine.attachment.close()


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
        names = hashes(2)
        engine.fill(names, [0, 1])
        cache.put(names, engine.where([0, 1]))
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
        names = hashes(7)
        engine.fill(names, range(7))
        assert cache.put(names, engine.where(range(7))).pages == 7
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


def test_clearing_reaches_the_namespace() -> None:
    engine = Engine(core=patient())
    with engine.attachment as cache:
        engine.fill(hashes(2), [0, 1])
        cache.put(hashes(2), engine.where([0, 1]))
        engine.shelf.objects["other/x"] = b""
        assert cache.clear() == {"shelf": Outcome.OK}
        assert list(engine.shelf.objects) == ["other/x"]


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
