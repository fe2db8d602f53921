"""Whatever a backend does: no wrong byte, no late call, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from math import comb
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shelf import (
    PAGES,
    Engine,
    Shelf,
    attention,
    draft,
    hashes,
    indexer,
    patient,
    states,
    until,
)
from stalls import LateError, timed

from kvdock.batch import Operation, Outcome
from kvdock.config.core import StagingPolicy
from kvdock.plugin.manifest import Support
from kvdock.testing.open_files import open_files
from kvdock.transfer.manager import TransferManager
from kvdock.wrappers.faults import Fault, FaultInjector, FaultSettings

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.transfer.futures import TransferFuture
    from kvdock.transfer.result import TransferResult

T = TypeVar("T")

COUNT = 6
POOLS = (attention(), draft(), indexer(), states())
DEADLINE_S = 0.06
REUSED = 0x77
ALLOWED_S = DEADLINE_S + 0.1


@attrs.frozen
class Trial:
    """One way to make trouble."""

    kinds: tuple[Fault, ...]
    rate: float = 1.0
    seed: int = 0
    staging: StagingPolicy = StagingPolicy.ROUTED
    multi_buffer: Support = Support.NATIVE
    gated: Support = Support.NATIVE
    max_batch_keys: int = 0
    operations: tuple[Operation, ...] = tuple(Operation)
    pools: tuple[str, ...] = ()
    clears: bool = True


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    threads, files = set(threading.enumerate()), open_files()
    yield
    until(lambda: not set(threading.enumerate()) - threads)
    assert not open_files() - files


def check_loaded(engine: Engine, names: Sequence[str], moved: TransferResult) -> None:
    """What is called loaded is right, and the prefix has all it needs."""
    for pool in engine.pools:
        codes, where = moved.outcomes[pool.name], moved.page_indices[pool.name]
        for at, page in enumerate(where.tolist()):
            if codes[at] == Outcome.OK:
                assert engine.holds(pool.name, names[at], page)
    for pool in engine.pools:
        if pool.required:
            first = moved.pages - pool.window_pages if pool.window_pages else 0
            needed = moved.outcomes[pool.name][max(0, first) : moved.pages]
            assert (needed == Outcome.OK).all()


def check_read(engine: Engine, names: Sequence[str], future: TransferFuture) -> None:
    """What a background read calls loaded is right."""
    loaded = np.flatnonzero(future.outcomes == Outcome.OK)
    for at in loaded.tolist():
        assert engine.holds(future.pool, names[at], int(future.pages[at]))


def recycle(engine: Engine) -> dict[str, Int64Array]:
    """Give every page that is not busy another use, as an engine would."""
    free = {}
    for pool, attached in engine.attachment.pools_by_name.items():
        if attached.pool.physical:
            free[pool] = np.flatnonzero(~attached.leases.in_use(range(PAGES)))
            reused = np.full((len(free[pool]), attached.page_bytes), REUSED, np.uint8)
            # Through the region: pages are not rows of memory in every layout.
            attached.region.scatter(free[pool], reused)
    return free


def drive_once(trial: Trial) -> None:
    def in_time(call: Callable[[], T]) -> T:
        return timed(call, ALLOWED_S)

    faults = FaultInjector(
        FaultSettings(
            kinds=trial.kinds, rate=trial.rate, seed=trial.seed, delay=0.02,
            operations=trial.operations, pools=trial.pools,
        )
    )  # fmt: skip
    core = patient(
        deadlines=dict.fromkeys(
            ("exists", "get", "put", "delete", "clear", "release"), DEADLINE_S
        )
        | {"close": 5, "grace": "10 ms"},
        calls={"staging": trial.staging, "batch_pages": 4, "max_concurrent_calls": 4},
    )
    shelf = Shelf(
        multi_buffer=trial.multi_buffer, max_batch_keys=trial.max_batch_keys,
        gated=trial.gated,
    )  # fmt: skip
    names = hashes(COUNT)
    with nothing_left_behind():
        engine = Engine([shelf], POOLS, core, faults=faults)
        cache = engine.attachment
        manager = TransferManager(cache)
        try:
            engine.fill(names, range(COUNT))
            in_time(lambda: cache.put(names, engine.where(range(COUNT))))
            written = [
                manager.write(pool, names, pages)
                for pool, pages in engine.where(range(COUNT)).items()
            ]
            until(lambda: all(one.ended for one in written))
            best = in_time(lambda: cache.exists(names)).best
            places = range(COUNT, 2 * COUNT)
            moved = in_time(
                lambda: cache.get(names[:best], engine.where(places[:best]))
            )
            check_loaded(engine, names, moved)
            places = range(2 * COUNT, 3 * COUNT)
            read = [
                manager.read(pool, names, pages)
                for pool, pages in engine.where(places).items()
            ]
            until(lambda: all(one.ended for one in read))
            for future in read:
                check_read(engine, names, future)
            free = recycle(engine)
            if trial.clears:
                # Those that hang find nothing any more once they go on.
                in_time(cache.clear)
            faults.release()
            assert all(one.wait(60) for one in [*written, *read])
            assert manager.drain(60)
            assert cache.wait_idle(60)
            # Late bytes landed only in pages that were still held back.
            for pool, pages in free.items():
                assert (engine.rows(pool, pages.tolist()) == REUSED).all()
                assert not cache.leases(pool).in_use(range(PAGES)).any()
            for attached in cache.pools_by_name.values():
                staging = attached.nearest.steps.staging
                if staging is not None:
                    assert len(staging._free) == core.calls.staging_buffers
            assert manager.close()
            assert sorted(map(str, shelf.released)) == sorted(
                pool.name for pool in POOLS
            )
        finally:
            faults.release()
            manager.close()


def drive(trial: Trial) -> None:
    """Try it, up to six times where it is only late.

    A busy machine spoils some attempts. A deadline that is not kept spoils all.
    """
    for _ in range(5):
        try:
            drive_once(trial)
        except LateError:
            continue
        return
    drive_once(trial)


@pytest.mark.parametrize(
    "staging",
    [
        StagingPolicy.ROUTED,
        StagingPolicy.ALWAYS,
        # Between these two; mixtures of faults try all four.
        pytest.param(StagingPolicy.SAFE, marks=pytest.mark.slow),
        pytest.param(StagingPolicy.LOADS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", list(Fault))
def test_each_fault_alone_is_a_miss_in_time(
    kind: Fault, staging: StagingPolicy
) -> None:
    drive(Trial((kind,), staging=staging))


# The same trials every time: a failure is one that others can repeat.
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    trial=st.builds(
        Trial,
        kinds=st.sets(st.sampled_from(Fault), min_size=1).map(tuple),
        rate=st.sampled_from([0.15, 0.4, 1.0]),
        seed=st.integers(0, 1 << 16),
        staging=st.sampled_from(StagingPolicy),
        multi_buffer=st.sampled_from([Support.NATIVE, Support.NO]),
        gated=st.sampled_from([Support.NATIVE, Support.NO]),
        max_batch_keys=st.sampled_from([0, 1, 3]),
        operations=st.sets(st.sampled_from(Operation), min_size=1).map(tuple),
        pools=st.sets(st.sampled_from([pool.name for pool in POOLS])).map(tuple),
        clears=st.booleans(),
    )
)
def test_any_mixture_of_faults_is_a_miss_in_time(trial: Trial) -> None:
    drive(trial)


@pytest.mark.parametrize("staging", list(StagingPolicy))
@pytest.mark.parametrize("pool", [pool.name for pool in POOLS])
def test_late_bytes_land_in_no_page_of_another_use(
    pool: str, staging: StagingPolicy
) -> None:
    """Of each pool alone: the anchor's misses would spare the others."""
    gets = (Operation.GET,)
    drive(
        Trial(
            (Fault.LATE,), staging=staging, operations=gets, pools=(pool,), clears=False
        )
    )


@pytest.fixture(scope="module")
def hands() -> Iterator[ProcessPoolExecutor]:
    """Processes, as a trial counts all threads of its own. They mostly wait."""
    with ProcessPoolExecutor(8, get_context("spawn")) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    "staging",
    [
        StagingPolicy.ROUTED,
        StagingPolicy.ALWAYS,
        # Between these two; each fault alone and mixtures of faults try all four.
        pytest.param(StagingPolicy.SAFE, marks=pytest.mark.long),
        pytest.param(StagingPolicy.LOADS, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(one, marks=[pytest.mark.long] if 3 <= one <= 8 else [])
        for one in range(2, len(Fault) + 1)
    ],
)
def test_every_combination_of_faults_is_a_miss_in_time(
    hands: ProcessPoolExecutor, size: int, staging: StagingPolicy
) -> None:
    trials = [
        Trial(kinds, rate=0.6, seed=seed, staging=staging, clears=bool(seed % 2))
        for seed, kinds in enumerate(combinations(Fault, size))
    ]
    assert len(list(hands.map(drive, trials))) == comb(len(Fault), size)


def test_without_a_fault_everything_is_restored() -> None:
    """Guards the tests above: a manager that moves nothing would pass them."""
    engine = Engine(pools=POOLS, core=patient(), faults=FaultInjector(FaultSettings()))
    with engine.attachment as cache:
        names = engine.store(COUNT)
        moved = cache.get(names, engine.where(range(COUNT, 2 * COUNT)))
        assert moved.pages == COUNT
        check_loaded(engine, names, moved)


def test_a_dropped_rank_loses_only_its_own_pages() -> None:
    from kvdock.pools.shard import Shard

    engines = []
    for rank in range(2):
        faults = FaultInjector(FaultSettings(kinds=(Fault.DROP,), ranks=(1,)))
        engines.append(
            Engine(
                pools=[attention()],
                core=patient(),
                faults=faults,
                shard=Shard(tp_rank=rank, tp_size=2),
            )
        )
    best = []
    for engine in engines:
        with engine.attachment as cache:
            engine.fill(hashes(2), [0, 1])
            cache.put(hashes(2), engine.where([0, 1]))
            best.append(cache.exists(hashes(2)).best)
    assert best == [2, 0]
