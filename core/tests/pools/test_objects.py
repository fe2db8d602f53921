from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvdock.errors import PoolError
from kvdock.pools.enums import (
    ContextSplit,
    DType,
    Layout,
    ObjectUnit,
    Per,
    PoolKind,
    Sharding,
)
from kvdock.pools.layout import stored_objects
from kvdock.pools.objects import Coordinate, StoredObject
from kvdock.pools.part import Part
from kvdock.pools.shard import Layers, Shard, every_shard
from kvdock.pools.spec import PoolSpec

LAYERS = 7


@st.composite
def pool_specs(draw: st.DrawFn) -> PoolSpec:
    sharding = draw(st.sampled_from(Sharding))
    heads = draw(st.sampled_from([1, 2, 4, 6, 8]))
    by_head = sharding is Sharding.HEADS or (
        sharding is Sharding.DCP and draw(st.booleans())
    )
    context = draw(st.sampled_from(ContextSplit))
    tokens_divided = sharding is Sharding.DCP or context is ContextSplit.TOKENS
    per = Per.TOKEN if tokens_divided else draw(st.sampled_from(Per))
    axis = 0 if by_head or sharding is Sharding.RANK else None
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    layers = draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
    return PoolSpec(
        name="some",
        kind=PoolKind.MHA,
        parts=tuple(
            Part(f"p{n}", DType.U8, (heads, width), per, axis)
            for n, width in enumerate(widths)
        ),
        layers=tuple(sorted(layers)),
        page_tokens=24,
        sharding=sharding,
        context=context,
        interleave_tokens=draw(st.sampled_from([1, 2])) if tokens_divided else 1,
        layout=draw(st.sampled_from(Layout)),
        object_unit=draw(st.sampled_from(ObjectUnit)),
        head_group=draw(st.sampled_from([0, 1, heads])) if by_head else 0,
    )


@st.composite
def deployments(draw: st.DrawFn) -> list[Shard]:
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    cuts = draw(st.sets(st.integers(1, LAYERS - 1), max_size=3))
    stages: tuple[Layers | None, ...] = tuple(pairwise([0, *sorted(cuts), LAYERS]))
    return list(
        every_shard(
            tp_size=tp_size,
            cp_size=draw(st.integers(1, 3)),
            dcp_size=draw(st.sampled_from([d for d in (1, 2, 4) if tp_size % d == 0])),
            stages=stages if len(stages) > 1 else (None,),
        )
    )


def held(
    pool: PoolSpec, shard: Shard, stored: StoredObject
) -> set[tuple[int, int, int, str]]:
    """Return every (layer, head, token, part) of an object, the slow way."""
    index, count = pool.token_runs(shard)
    tokens = [
        token
        for token in range(pool.page_tokens)
        if token // pool.interleave_tokens % count == index
    ]
    heads = stored.heads or (0, 1)
    return set(product(stored.layers, range(*heads), tokens, stored.parts))


def objects_of_all(
    pool: PoolSpec, shards: list[Shard]
) -> list[tuple[Shard, StoredObject]]:
    try:
        for shard in shards:
            pool.writes(shard)
        return [(shard, one) for shard in shards for one in stored_objects(pool, shard)]
    except PoolError:
        # Heads or tokens do not divide among so many ranks: refused by name.
        assume(False)
        raise


@given(pool_specs(), deployments())
def test_every_object_has_one_writer_and_one_meaning(
    pool: PoolSpec, shards: list[Shard]
) -> None:
    writers: dict[tuple[str, int], int] = defaultdict(int)
    meaning: dict[str, tuple[set[tuple[int, int, int, str]], int]] = {}
    for shard, stored in objects_of_all(pool, shards):
        content = (held(pool, shard, stored), stored.nbytes)
        assert meaning.setdefault(stored.coordinate, content) == content
        if pool.context is ContextSplit.PAGES:
            # Page i lies on one rank; only that one is given it to store.
            for page in range(shards[0].cp_size):
                mine = page == shard.cp_rank
                writers[stored.coordinate, page] += mine and pool.writes(shard)
        else:
            writers[stored.coordinate, 0] += pool.writes(shard)
    assert set(writers.values()) <= {1}
    if pool.sharding is not Sharding.RANK:
        contents = [frozenset(content) for content, _ in meaning.values()]
        assert len(set(contents)) == len(contents)


@given(pool_specs(), deployments())
def test_the_objects_of_all_ranks_are_the_whole_page_and_nothing_twice(
    pool: PoolSpec, shards: list[Shard]
) -> None:
    assume(pool.sharding is not Sharding.RANK)
    found = objects_of_all(pool, shards)
    distinct = {one.coordinate: held(pool, shard, one) for shard, one in found}
    heads = range(pool.heads if pool.by_head else 1)
    whole = set(
        product(
            pool.layers,
            heads,
            range(pool.page_tokens),
            (part.name for part in pool.parts),
        )
    )
    assert set().union(*distinct.values()) == whole
    assert sum(map(len, distinct.values())) == len(whole)
    nbytes = {one.coordinate: one.nbytes for _, one in found}
    assert sum(nbytes.values()) == pool.page_bytes(Shard()), "no byte is lost"


@given(pool_specs(), deployments())
def test_a_rank_holds_the_bytes_of_its_objects(
    pool: PoolSpec, shards: list[Shard]
) -> None:
    objects_of_all(pool, shards)
    for shard in shards:
        total = sum(stored.nbytes for stored in stored_objects(pool, shard))
        assert total == pool.page_bytes(shard)


@given(pool_specs(), deployments())
def test_coordinates_can_be_read_back(pool: PoolSpec, shards: list[Shard]) -> None:
    for _, stored in objects_of_all(pool, shards):
        read = Coordinate.parse(stored.coordinate)
        assert str(read) == stored.coordinate
        assert read.pool == pool.name
        assert read.heads == stored.heads
        assert read.layers == (stored.layers[0], stored.layers[-1] + 1)


def mha(**changes: object) -> PoolSpec:
    given: dict[str, object] = {
        "name": "kv",
        "kind": PoolKind.MHA,
        "parts": (
            Part("k", DType.BF16, (8, 16), shard_axis=0),
            Part("v", DType.BF16, (8, 16), shard_axis=0),
        ),
        "layers": range(4),
        "page_tokens": 16,
    }
    return PoolSpec(**(given | changes))  # type: ignore[arg-type]  # a test's shorthand


def coordinates(pool: PoolSpec, **sizes: int) -> set[str]:
    shards = every_shard(**sizes)  # type: ignore[arg-type]  # sizes alone
    return {one.coordinate for shard in shards for one in stored_objects(pool, shard)}


def test_tp2_reads_what_tp4_wrote_where_head_groups_divide_both() -> None:
    grouped = mha(head_group=2)
    assert coordinates(grouped, tp_size=2) == coordinates(grouped, tp_size=4)
    assert coordinates(grouped, tp_size=1) == {
        f"kv.L0-4.H{head}-{head + 2}" for head in (0, 2, 4, 6)
    }


def test_more_ranks_than_heads_share_the_objects_of_a_head() -> None:
    pool = mha()
    assert coordinates(pool, tp_size=16) == coordinates(pool, tp_size=8)
    writing = [s.tp_rank for s in every_shard(tp_size=16) if pool.writes(s)]
    assert writing == list(range(0, 16, 2))


def test_an_uneven_pipeline_shares_the_stages_that_agree() -> None:
    pool = mha(layers=range(61))
    one = {
        stored.coordinate
        for layers in ((0, 31), (31, 61))
        for stored in stored_objects(pool, Shard(pp_size=2, layers=layers))
    }
    other = {
        stored.coordinate
        for layers in ((0, 31), (31, 50), (50, 61))
        for stored in stored_objects(pool, Shard(pp_size=3, layers=layers))
    }
    assert one & other == {"kv.L0-31.H0-8"}


def test_every_pipeline_stage_marks_a_logical_page_for_itself() -> None:
    anchor = PoolSpec(
        name="kv",
        kind=PoolKind.LOGICAL,
        parts=(),
        layers=(),
        page_tokens=64,
        anchor=True,
    )
    (alone,) = stored_objects(anchor, Shard())
    assert (alone.coordinate, alone.nbytes) == ("kv.mark", 0)
    marks = defaultdict(list)
    for shard in every_shard(tp_size=2, cp_size=2, stages=[(0, 3), (3, 5)]):
        (mark,) = stored_objects(anchor, shard)
        marks[mark.coordinate].append(anchor.writes(shard))
    assert {name: sum(writes) for name, writes in marks.items()} == {
        "kv.mark.L0-3": 1,
        "kv.mark.L3-5": 1,
    }


def test_a_part_without_bytes_is_never_an_object_of_its_own() -> None:
    conv_only = PoolSpec(
        name="mamba",
        kind=PoolKind.MAMBA,
        parts=(
            Part("temporal", DType.F32, (0, 16), Per.PAGE, 0),
            Part("conv_0", DType.BF16, (64, 3), Per.PAGE, 0),
        ),
        layers=(0, 2),
        page_tokens=1,
        sharding=Sharding.RANK,
        object_unit=ObjectUnit.PART,
    )
    shard = Shard(tp_rank=1, tp_size=2)
    assert [one.coordinate for one in stored_objects(conv_only, shard)] == [
        "mamba.L0-3.R1of2.conv_0"
    ]


@pytest.mark.parametrize("text", ["", "KV.L0-1", "kv.L1", "kv.H0-1.L0-1", "kv..k"])
def test_what_is_no_coordinate_is_refused(text: str) -> None:
    with pytest.raises(PoolError, match="not an object's coordinate"):
        Coordinate.parse(text)
