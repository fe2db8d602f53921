from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import PoolError
from kvdock.pools.shard import Shard, even_shares, every_shard, stages_of


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


def test_every_process_of_a_deployment_has_a_shard_of_its_own() -> None:
    shards = list(
        every_shard(tp_size=4, cp_size=2, dcp_size=2, stages=[(0, 3), (3, 5)])
    )
    assert len(set(shards)) == len(shards) == 16
    assert {(s.pp_rank, s.layers) for s in shards} == {(0, (0, 3)), (1, (3, 5))}
    assert all(s.dcp_rank == s.tp_rank % 2 for s in shards)


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
