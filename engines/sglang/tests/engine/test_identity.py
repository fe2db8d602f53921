"""What a process of the engine is called, and what its pages belong to."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

from kvdock.hookspecs import AttachConfig
from kvdock_sglang.identity import Ranks


def ranks(dp: int, pp: int, cp: int, tp: int) -> Ranks:
    """Read what the engine tells one rank of 2 x 2 x 2 x 2."""
    config: Any = SimpleNamespace(
        tp_rank=tp,
        tp_size=2,
        pp_rank=pp,
        pp_size=2,
        attn_cp_rank=cp,
        attn_cp_size=2,
        dp_rank=dp,
        dcp_rank=0,
        dcp_size=1,
    )
    return Ranks.of(config)


def test_every_process_of_an_engine_has_a_name_of_its_own_and_keeps_it() -> None:
    """They have one configuration, and most of them equal shards."""
    everybody = [ranks(*one) for one in product(range(2), repeat=4)]
    names = [one.process for one in everybody]
    assert len(set(names)) == 16
    assert len({one.shard for one in everybody}) == 2
    assert names[5] == "dp0-pp1-cp0-tp1" == ranks(0, 1, 0, 1).process
    assert [AttachConfig(process=name).process for name in names] == names


def test_a_replica_shares_the_pages_of_the_others() -> None:
    assert ranks(0, 0, 0, 1).shard == ranks(1, 0, 0, 1).shard
