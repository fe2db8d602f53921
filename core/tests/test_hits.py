from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import PoolError
from kvdock.hits import allowed_prefixes, evaluate
from kvdock.pools.enums import DType, HitPolicy, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec


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
