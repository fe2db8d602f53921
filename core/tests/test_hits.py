from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import PoolError
from kvdock.hits import Hits, agree, allowed_prefixes, evaluate, intersect
from kvdock.pools.enums import DType, HitPolicy, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int32Array


def pool(name: str = "kv", **changes: Any) -> PoolSpec:
    given: dict[str, Any] = {
        "name": name,
        "kind": PoolKind.MLA,
        "parts": (Part("kv", DType.BF16, (4,)),),
        "layers": (0,),
        "page_tokens": 16,
    }
    return PoolSpec(**(given | changes))


def trailing(window: int, name: str = "swa", **changes: Any) -> PoolSpec:
    return pool(name, hit_policy="trailing_pages", window_pages=window, **changes)


def groups(block: int, group: int) -> PoolSpec:
    return pool(
        "blocks",
        hit_policy="block_groups",
        block_pages=block,
        group_pages=group,
        required=False,
    )


def naive(one: PoolSpec, exists: list[bool]) -> list[int]:
    """Return the prefixes that a pool allows, page by page."""
    allowed = []
    for prefix in range(len(exists) + 1):
        match one.hit_policy:
            case HitPolicy.ALL_PAGES:
                good = all(exists[:prefix])
            case HitPolicy.TRAILING_PAGES:
                good = all(exists[max(0, prefix - one.window_pages) : prefix])
            case HitPolicy.BLOCK_GROUPS:
                good = prefix % one.block_pages == 0 and all(
                    exists[page]
                    for end in range(one.block_pages, prefix + 1, one.block_pages)
                    for page in range(end - one.group_pages, end)
                )
        if good:
            allowed.append(prefix)
    return allowed


policies = st.one_of(
    st.builds(pool),
    st.builds(trailing, st.integers(1, 6)),
    st.integers(1, 5).flatmap(
        lambda block: st.builds(groups, st.just(block), st.integers(1, block))
    ),
)
answers = st.lists(st.booleans(), max_size=24)
several = st.lists(st.booleans(), min_size=1, max_size=24).flatmap(
    lambda first: st.lists(
        st.lists(st.booleans(), min_size=len(first), max_size=len(first)),
        min_size=1,
        max_size=4,
    )
)


@given(policies, answers)
def test_allowed_prefixes_are_those_of_a_naive_loop(
    one: PoolSpec, exists: list[bool]
) -> None:
    allowed = allowed_prefixes(one, np.array(exists, np.bool_))
    assert np.flatnonzero(allowed).tolist() == naive(one, exists)


@given(several, st.data())
def test_evaluation_is_the_intersection_of_naive_loops(
    rows: list[list[bool]], data: st.DataObject
) -> None:
    pools = [pool("kv", anchor=True)]
    for number in range(1, len(rows)):
        one = data.draw(policies)
        required = one.hit_policy is not HitPolicy.BLOCK_GROUPS and data.draw(
            st.booleans()
        )
        pools.append(
            pool(
                f"p{number}",
                hit_policy=one.hit_policy,
                window_pages=one.window_pages,
                block_pages=one.block_pages,
                group_pages=one.group_pages,
                required=required,
            )
        )
    exists = {one.name: row for one, row in zip(pools, rows, strict=True)}
    hits = evaluate(pools, exists, len(rows[0]))
    each = {one.name: naive(one, exists[one.name]) for one in pools}
    wanted = set.intersection(*(set(each[one.name]) for one in pools if one.required))
    assert set(hits.prefixes) == wanted - {0}
    assert hits.best == max(wanted)
    assert hits.found == {name: max(allowed) for name, allowed in each.items()}


def test_the_minimum_of_maxima_would_be_wrong_and_is_not_the_answer() -> None:
    pools = [pool(anchor=True), pool("indexer"), trailing(1, "mamba")]
    exists = {
        "kv": [True] * 6,
        "indexer": [True] * 4 + [False] * 2,
        "mamba": [page in (1, 4) for page in range(6)],
    }
    hits = evaluate(pools, exists, 6)
    assert hits.found == {"kv": 6, "indexer": 4, "mamba": 5}
    assert hits.best == 2


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**70])
def test_a_window_may_be_wider_than_anything(window: int) -> None:
    swa, exists = trailing(window), [True, True, False, True]
    assert np.flatnonzero(allowed_prefixes(swa, np.array(exists))).tolist() == [0, 1, 2]


def test_an_optional_pool_is_reported_and_cuts_nothing() -> None:
    pools = [pool(anchor=True), pool("draft", draft=True, required=False)]
    hits = evaluate(pools, {"kv": [True] * 3, "draft": [True, False, True]}, 3)
    assert (hits.best, hits.found["draft"]) == (3, 1)


def test_a_logical_anchor_exists_unless_somebody_says_otherwise() -> None:
    anchor = pool(kind="logical", parts=(), layers=(), anchor=True)
    pools = [anchor, trailing(2)]
    assert evaluate(pools, {"swa": [True] * 3}, 3).best == 3
    marked = {"swa": [True] * 3, "kv": [True, False, False]}
    assert evaluate(pools, marked, 3).best == 1


def test_a_missing_or_short_answer_is_refused() -> None:
    with pytest.raises(PoolError, match="the pages of 'kv' that exist are not given"):
        evaluate([pool()], {}, 2)
    with pytest.raises(PoolError, match=r"\(1,\) answers for 2 pages"):
        evaluate([pool()], {"kv": [True]}, 2)


def all_ranks(local: list[Hits | None], pages: int, names: list[str]) -> list[Hits]:
    """Run `agree` on every rank with an all-reduce that sees all of them."""
    sent: list[Int32Array] = []

    def send(vector: Int32Array) -> Int32Array:
        sent.append(vector.copy())
        return vector

    for hits in local:
        agree(hits, pages, names, send)
    assert len(sent) == len(local), "one collective a rank, whatever happened"
    assert len({len(vector) for vector in sent}) == 1
    least = np.minimum.reduce(sent)
    return [agree(hits, pages, names, lambda _: least) for hits in local]


@given(several)
def test_what_ranks_agree_on_is_restorable_on_each(rows: list[list[bool]]) -> None:
    pages = len(rows[0])
    local = [evaluate([trailing(2, anchor=False)], {"swa": row}, pages) for row in rows]
    agreed = all_ranks([*local], pages, ["swa"])
    together = intersect([hits.restorable for hits in local])
    for hits in agreed:
        assert hits.restorable.tolist() == together.tolist()
        assert all(one.restorable[hits.best] for one in local)
        assert hits.found == {"swa": min(one.found["swa"] for one in local)}


def test_ranks_that_could_each_restore_more_agree_on_what_both_can() -> None:
    local: list[Hits | None] = [
        Hits({"mamba": 4}, np.array([True, False, True, False, True, False])),
        Hits({"mamba": 5}, np.array([True, False, True, False, False, True])),
    ]
    assert {hits.best for hits in all_ranks(local, 5, ["mamba"])} == {2}


def test_a_failed_rank_still_takes_part_and_nobody_restores() -> None:
    good = Hits({"kv": 3}, np.ones(4, np.bool_))
    agreed = all_ranks([good, None], 3, ["kv"])
    assert [hits.best for hits in agreed] == [0, 0]
    assert agreed[0].found == {"kv": 0}


def test_a_pool_of_another_stage_is_cut_by_the_ranks_that_have_it() -> None:
    first = Hits({"kv": 3}, np.ones(4, np.bool_))
    second = Hits({"kv": 3, "swa": 2}, np.array([True, True, True, False]))
    agreed = all_ranks([first, second], 3, ["kv", "swa"])
    assert agreed[0].found == {"kv": 3, "swa": 2}
    assert agreed[0].best == 2


def test_an_all_reduce_may_work_in_place() -> None:
    def in_place(vector: Int32Array) -> None:
        vector[1:] = 0

    hits = Hits({"kv": 2}, np.ones(3, np.bool_))
    assert agree(hits, 2, ["kv"], in_place).best == 0


def test_hits_about_another_prefix_are_refused_after_the_collective() -> None:
    calls: list[BoolArray] = []

    def record(vector: Int32Array) -> None:
        calls.append(vector.astype(np.bool_))

    with pytest.raises(PoolError, match="hits about 4 pages where 2"):
        agree(Hits.nothing(4), 2, ["kv"], record)
    assert len(calls) == 1
    with pytest.raises(PoolError, match="turned"):
        agree(Hits.nothing(2), 2, ["kv"], lambda vector: vector[:1])
    with pytest.raises(PoolError, match="ranks answered about"):
        intersect([np.ones(2, np.bool_), np.ones(3, np.bool_)])
