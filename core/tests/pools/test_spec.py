from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import PoolError
from kvdock.pools.enums import (
    ContextSplit,
    DType,
    HitPolicy,
    Layout,
    Per,
    PoolKind,
    Sharding,
)
from kvdock.pools.layout import stored_objects
from kvdock.pools.part import Part
from kvdock.pools.rows import RowLayout
from kvdock.pools.shard import Shard, even_shares, stages_of
from kvdock.pools.spec import PoolSpec, check_pools

K = Part("k", DType.BF16, (8, 16), shard_axis=0)

LATENT = Part("kv", DType.BF16, (576,))

STATE = Part("state", DType.F32, (16,), Per.PAGE)


def pool(name: str = "kv", **changes: Any) -> PoolSpec:
    given: dict[str, Any] = {
        "name": name,
        "kind": PoolKind.MHA,
        "parts": (K,),
        "layers": range(4),
        "page_tokens": 16,
    }
    return PoolSpec(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": (K, K)}, "names a part twice"),
        ({"parts": ()}, "has 0 parts"),
        ({"layers": ()}, "has no layers"),
        ({"layers": (2, 1)}, "not ascending"),
        ({"anchor": True, "required": False}, "required, with its own indices"),
        ({"anchor": True, "indices_from": "swa"}, "required, with its own indices"),
        (
            {"anchor": True, "hit_policy": "trailing_pages", "window_pages": 1},
            "every page of it",
        ),
        ({"hit_policy": "trailing_pages"}, "window_pages=0"),
        ({"window_pages": 2}, "window_pages=2"),
        ({"hit_policy": "block_groups", "block_pages": 2}, "group_pages=0"),
        (
            {"hit_policy": "block_groups", "block_pages": 2, "group_pages": 3},
            "at most as many",
        ),
        (
            {"hit_policy": "block_groups", "block_pages": 2, "group_pages": 1},
            "never cut a prefix",
        ),
        ({"block_pages": 2}, "block_pages=2"),
        ({"sharding": "replicated"}, "a part has a shard_axis"),
        ({"parts": (K, LATENT)}, "not every part is"),
        ({"parts": (K, LATENT), "sharding": "dcp"}, "not every part is"),
        ({"parts": (LATENT,), "sharding": "rank"}, "but no part is"),
        (
            {"parts": (K, Part("v", DType.BF16, (4, 16), shard_axis=0))},
            "different head counts",
        ),
        ({"head_group": 3}, "does not divide 8 heads"),
        ({"head_group": -2}, "does not divide"),
        ({"head_group": 2, "parts": (LATENT,)}, "needs a pool divided by heads"),
        ({"interleave_tokens": 4}, "divides none"),
        ({"parts": (STATE,), "sharding": "dcp"}, "counted per page"),
        ({"parts": (STATE,), "context": "tokens"}, "counted per page"),
        ({"kind": "logical", "parts": (), "context": "pages"}, "no bytes that ranks"),
        ({"parts": (Part("k", DType.BF16, (0,)),)}, "no bytes in any"),
        ({"page_tokens": 0}, "page_tokens must be at least 1"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        pool(**changes)


def test_heads_and_ranks_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(PoolError, match="'kv': 8 heads cannot be divided among 3"):
        pool().local_heads(Shard(tp_size=3))
    with pytest.raises(PoolError, match="head_group 8 does not divide the 4 heads"):
        pool(head_group=8).head_groups(Shard(tp_size=2))


def test_a_state_whose_first_part_is_empty_is_still_divided_among_ranks() -> None:
    """Linear attention with convolutions alone has no temporal state."""
    parts = (
        Part("temporal", DType.F32, (0, 4), Per.PAGE, 0),
        Part("conv_0", DType.BF16, (8, 3), Per.PAGE, 0),
    )
    state = pool("mamba", kind="mamba", parts=parts, layers=(0,), sharding="rank")
    for rank in range(2):
        shard = Shard(tp_rank=rank, tp_size=2)
        assert state.head_groups(shard) == ((0, 1),)
        assert [one.nbytes for one in stored_objects(state, shard)] == [24]
        assert state.page_bytes(shard) == 24
        assert state.writes(shard)


def test_tokens_and_ranks_that_do_not_divide_are_refused_by_name() -> None:
    shard = Shard(tp_size=8, dcp_size=8)
    divided = pool(parts=(LATENT,), sharding=Sharding.DCP, interleave_tokens=4)
    with pytest.raises(PoolError, match=r"16 tokens .* 8 ranks in runs of 4"):
        divided.local_tokens(shard)


def test_dcp_ranks_must_hold_the_same_heads() -> None:
    divided = pool(sharding=Sharding.DCP)
    with pytest.raises(PoolError, match="cannot share the 1 copies of a head"):
        divided.writes(Shard(tp_size=4, dcp_size=2))
    assert divided.writes(Shard(tp_size=16, tp_rank=1, dcp_size=2, dcp_rank=1))


def test_tokens_are_divided_by_dcp_and_cp_at_once() -> None:
    divided = pool(parts=(LATENT,), sharding=Sharding.DCP, context=ContextSplit.TOKENS)
    runs = {
        divided.token_runs(
            Shard(tp_size=2, tp_rank=d, dcp_size=2, dcp_rank=d, cp_size=2, cp_rank=c)
        )
        for c in range(2)
        for d in range(2)
    }
    assert runs == {(index, 4) for index in range(4)}


def test_layers_are_divided_among_context_ranks_as_evenly_as_can_be() -> None:
    divided = pool(layers=range(10), context=ContextSplit.LAYERS)
    held = [
        divided.local_layers(Shard(cp_rank=r, cp_size=4, layers=(0, 7)))
        for r in range(4)
    ]
    assert held == [(0, 1), (2, 3), (4, 5), (6,)]


ANCHOR = pool(anchor=True)

SWA = pool("swa", hit_policy=HitPolicy.TRAILING_PAGES, window_pages=2)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([ANCHOR, ANCHOR], "'kv' is described twice"),
        ([SWA], "one anchor, not 0"),
        ([ANCHOR, pool("other", anchor=True)], "one anchor, not 2"),
        ([ANCHOR, SWA, pool("x", indices_from="sva")], "Did you mean 'swa'"),
        ([ANCHOR, pool("x", page_tokens=8)], "pages of 8 tokens"),
        (
            [ANCHOR, pool("x", indices_from="kv"), pool("y", indices_from="x")],
            "Name their root: indices_from='kv'",
        ),
        ([ANCHOR, pool("x", indices_from="x")], "has none of its own"),
        ([ANCHOR, SWA, pool("x", indices_from="swa")], "needs all of them"),
        (
            [
                ANCHOR,
                SWA,
                pool(
                    "x",
                    indices_from="swa",
                    hit_policy=HitPolicy.TRAILING_PAGES,
                    window_pages=3,
                ),
            ],
            "needs 3 of them",
        ),
    ],
)
def test_pools_that_do_not_belong_together_are_refused(
    pools: list[PoolSpec], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        check_pools(pools)


def test_pools_whose_hits_the_engine_evaluates_need_no_anchor_and_no_common_page() -> (
    None
):
    check_pools(
        [pool("a", engine_hits=True), pool("b", engine_hits=True, page_tokens=8)]
    )
    with pytest.raises(PoolError, match="evaluates the hits of a, and not of kv"):
        check_pools([pool("a", engine_hits=True), ANCHOR])
    with pytest.raises(PoolError, match="so it is not an anchor"):
        pool("a", engine_hits=True, anchor=True)
    with pytest.raises(PoolError, match="has no hit policy"):
        pool(
            "a",
            engine_hits=True,
            hit_policy=HitPolicy.TRAILING_PAGES,
            window_pages=2,
        )


def test_pages_in_pieces_are_objects_of_rows() -> None:
    assert pool("a", pieces=3).pieces == 3
    with pytest.raises(PoolError, match="in pieces, but layout page_first"):
        pool("a", pieces=2, layout=Layout.PAGE_FIRST)
    with pytest.raises(PoolError, match="pieces must be at least 1"):
        pool("a", pieces=0)


def test_an_entry_counts_what_lies_above_at_and_below_the_divided_axis() -> None:
    part = Part("kv", DType.BF16, (2, 8, 128), shard_axis=1)
    assert (part.outer, part.units, part.row_bytes) == (2, 8, 256)
    assert part.entry_bytes == 2 * 8 * 128 * 2


def test_two_fp4_numbers_share_a_byte() -> None:
    assert Part("payload", DType.FP4_E2M1, (128,)).entry_bytes == 64
    with pytest.raises(PoolError, match="not a whole number of bytes"):
        Part("payload", DType.FP4_E2M1, (3,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("k", DType.BF16, (-1, 2)), "negative extent"),
        (("k", DType.BF16, (2,), Per.TOKEN, 1), "shard_axis 1 is outside"),
        (("K", DType.BF16, (2,)), "'K' is not a valid name"),
        (("k/../v", DType.BF16, (2,)), "not a valid name"),
    ],
)
def test_an_impossible_part_is_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Part(*arguments)  # type: ignore[arg-type]  # one case after the other


def test_pieces_are_repeated_in_every_ranks_slot_and_joined_where_they_touch() -> None:
    rows = RowLayout(row_bytes=200, pieces=[(0, 8), (8, 4), (20, 10)], slots=[0, 100])
    assert rows.page_bytes == 44
    assert rows.runs == ((0, 12), (20, 10), (100, 12), (120, 10))


def test_pieces_that_touch_in_another_order_stay_apart() -> None:
    rows = RowLayout(row_bytes=16, pieces=[(8, 8), (0, 8)])
    assert rows.runs == ((8, 8), (0, 8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pieces": [(0, 8), (4, 8)]}, "4 overlaps another of a row of 32 bytes"),
        ({"pieces": [(0, 8)], "slots": [0, 4]}, "4 overlaps another"),
        ({"pieces": [(30, 8)]}, "8 bytes at 30 is not inside of a row of 32"),
        ({"pieces": [(0, 8)], "slots": [-8]}, "at -8 is not inside"),
        ({"pieces": [(0, 0)]}, r"\(offset, bytes\), not \(0, 0\)"),
        ({"pieces": [(0, 8.0)]}, r"\(offset, bytes\), not \(0, 8.0\)"),
        ({"pieces": [(0, 8, 1)]}, r"not \(0, 8, 1\)"),
        ({"pieces": []}, "0 pieces in 1 slots"),
        ({"pieces": [(0, 8)], "slots": []}, "1 pieces in 0 slots"),
        ({"pieces": [(0, 8)], "row_bytes": 0}, "row_bytes must be at least 1"),
    ],
)
def test_pieces_that_are_not_parts_of_a_row_are_rejected(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        RowLayout(**{"row_bytes": 32, **given})


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_are_even_and_whole(total: int, ranks: int) -> None:
    shares = even_shares(total, ranks)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_stages_lie_side_by_side(counts: list[int]) -> None:
    stages = stages_of(counts)
    assert [stop - start for start, stop in stages] == counts
    assert stages[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(stages))


@pytest.mark.parametrize("counts", [[], [3, 0], [-1]])
def test_a_stage_without_layers_is_refused(counts: list[int]) -> None:
    with pytest.raises(PoolError, match="are not a partition"):
        stages_of(counts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank 2 is outside of tp_size 2"),
        ({"cp_size": 0}, "cp_size must be at least 1"),
        ({"pp_size": 2}, "the stage's layers are not given"),
        ({"layers": (3, 3)}, "are not a range"),
        ({"tp_size": 3, "dcp_size": 2}, "does not divide tp_size 3"),
        (
            {"tp_size": 4, "tp_rank": 1, "dcp_size": 2},
            "dcp_rank 0 does not belong to tp_rank 1",
        ),
    ],
)
def test_an_impossible_shard_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Shard(**fields)  # type: ignore[arg-type]  # one case after the other
