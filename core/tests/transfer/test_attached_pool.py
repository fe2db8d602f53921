from __future__ import annotations

import time

import pytest
from shelf import (
    Engine,
    Shelf,
    attention,
    hashes,
    indexer,
    patient,
)

from kvdock.batch import Outcome
from kvdock.config.core import StagingPolicy
from kvdock.errors import KvdockError, RegionError
from kvdock.transfer.result import NO_PAGE


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
