"""Pools of an engine that keeps their pages in common rows and evaluates hits."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from shelf import ByteArray, Shelf, hashes, patient

from kvdock.batch import Outcome
from kvdock.config.core import StagingPolicy
from kvdock.dock import Dock
from kvdock.errors import KvdockError, PoolError, RegionError
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.plugin.manifest import Support
from kvdock.pools.enums import DType, Layout, Per, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.rows import RowLayout
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.routing.verdicts import TransferMode
from kvdock.transfer.attachment import Attachment

ROWS, ROW_BYTES = 12, 160
# Two ranks with a slot of 80 bytes each; 8 bytes of it belong to no pool.
LAYOUTS = {
    "kv": RowLayout(row_bytes=ROW_BYTES, pieces=[(0, 16), (24, 16)], slots=[0, 80]),
    "swa": RowLayout(row_bytes=ROW_BYTES, pieces=[(16, 8), (40, 30)], slots=[0, 80]),
}
KINDS = {"kv": PoolKind.MHA, "swa": PoolKind.SWA}
TOKENS = {"kv": 16, "swa": 32}


def pool_in_rows(name: str, rows: RowLayout) -> PoolSpec:
    return PoolSpec(
        name=name,
        kind=KINDS[name],
        parts=[Part("row", DType.U8, (rows.page_bytes,), Per.PAGE)],
        layers=[0],
        page_tokens=TOKENS[name],
        engine_hits=True,
        pieces=len(rows.runs),
    )


POOLS = {name: pool_in_rows(name, rows) for name, rows in LAYOUTS.items()}


def attach(shelf: Shelf, memory: ByteArray, staging: StagingPolicy) -> Attachment:
    dock = Dock({shelf.name: shelf.backend()})
    plan = dock.plan(list(POOLS.values()), Shard())
    regions = {
        name: Region.of_rows(POOLS[name], Shard(), memory, ROWS, rows)
        for name, rows in LAYOUTS.items()
    }
    core = patient(calls={"staging": staging})
    return Attachment.open(dock, plan, Namespace(model="m"), regions, core=core)


def bytes_of(name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which bytes of a row belong to a pool."""
    mine = np.zeros(ROW_BYTES, np.bool_)
    for start, size in LAYOUTS[name].runs:
        mine[start : start + size] = True
    return mine


@pytest.mark.parametrize("staging", list(StagingPolicy))
@pytest.mark.parametrize("multi_buffer", [Support.NATIVE, Support.NO])
def test_a_pool_moves_its_own_bytes_of_a_row_and_no_others(
    staging: StagingPolicy, multi_buffer: Support
) -> None:
    shelf = Shelf(multi_buffer=multi_buffer)
    random = np.random.default_rng(1)
    memory = random.integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    stored = memory.copy()
    with attach(shelf, memory, staging) as attachment:
        direct = multi_buffer is Support.NATIVE
        for route in attachment.plan.routes:
            assert (route.mode is TransferMode.ZERO_COPY) is direct
        names = hashes(3)
        for name in POOLS:
            assert not attachment[name].put(names, [1, 5, 3]).any()
        memory[:] = 0xEE
        assert not attachment["kv"].get(names, [7, 2, 9]).any()
        mine = bytes_of("kv")
        assert (memory[[7, 2, 9]][:, mine] == stored[[1, 5, 3]][:, mine]).all()
        assert (memory[:, ~mine] == 0xEE).all()
        others = [row for row in range(ROWS) if row not in {7, 2, 9}]
        assert (memory[others] == 0xEE).all()
        assert not attachment["swa"].get(names, [7, 2, 9]).any()
        both = mine | bytes_of("swa")
        assert (memory[[7, 2, 9]][:, both] == stored[[1, 5, 3]][:, both]).all()
        assert (memory[:, ~both] == 0xEE).all()
    sizes = {len(data) for key, data in shelf.objects.items() if ".kv." in key}
    assert sizes == {LAYOUTS["kv"].page_bytes + 40}


def test_each_pool_is_asked_alone_and_prefixes_are_left_to_the_engine() -> None:
    memory = np.zeros((ROWS, ROW_BYTES), np.uint8)
    with attach(Shelf(), memory, StagingPolicy.ROUTED) as attachment:
        attachment["swa"].put(hashes(2), [0, 1])
        assert attachment["swa"].exists(hashes(3)).tolist() == [True, True, False]
        assert not attachment["kv"].exists(hashes(3)).any()
        assert attachment["swa"].get(hashes(3), [4, 5, 6]).tolist() == [
            Outcome.OK,
            Outcome.OK,
            Outcome.ABSENT,
        ]
        for call in (
            lambda: attachment.exists(hashes(1)),
            lambda: attachment.put(hashes(1), {"kv": [0], "swa": [0]}),
            lambda: attachment.get(hashes(1), {"kv": [0], "swa": [0]}),
        ):
            with pytest.raises(KvdockError, match="evaluates hits itself"):
                call()
        with pytest.raises(PoolError, match="no pool of this plan is the anchor"):
            _ = attachment.plan.anchor
        assert all(one.ok for one in attachment.self_test())


@pytest.mark.parametrize(
    ("changes", "pages", "message"),
    [
        ({"pieces": 1}, ROWS, "64 bytes a page in 1 pieces.*64 in 4"),
        (
            {"parts": [Part("row", DType.U8, (63,), Per.PAGE)]},
            ROWS,
            "63 bytes a page.*64 in 4",
        ),
        (
            {"pieces": 1, "layout": Layout.PAGE_FIRST},
            ROWS,
            "layout page_first.*page_object",
        ),
        ({}, ROWS + 1, "13 rows of 160 bytes do not lie in 1920 bytes"),
        ({}, 0, "0 rows of 160 bytes"),
    ],
)
def test_a_pool_that_is_not_its_rows_is_rejected(
    changes: dict[str, object], pages: int, message: str
) -> None:
    memory = np.zeros((ROWS, ROW_BYTES), np.uint8)
    pool = attrs.evolve(POOLS["kv"], **changes)  # type: ignore[arg-type]  # by name
    with pytest.raises(RegionError, match=message):
        Region.of_rows(pool, Shard(), memory, pages, LAYOUTS["kv"])
