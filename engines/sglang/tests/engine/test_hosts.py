"""One engine on several hosts: what one rank stores, the others must find."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import test_families as families
import zoo
from sglang.srt import runtime_context

from kvdock.errors import NoRoute
from kvdock_sglang.identity import spans_hosts

if TYPE_CHECKING:
    from pathlib import Path


def run_on(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Let the engine believe in hosts; its own objects refuse half a truth."""
    found = SimpleNamespace(**sizes)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: found)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one on each host."""
    run_on(monkeypatch, nnodes=2, tp_size=2, pp_size=1)


@pytest.mark.parametrize(
    ("nnodes", "tp_size", "pp_size", "group", "spans"),
    [
        (1, 8, 1, 8, False),
        (2, 16, 1, 16, True),
        # Each stage has a host of its own, and so has each attention group.
        (2, 8, 2, 8, False),
        (2, 16, 1, 8, False),
        (2, 16, 1, 1, False),
        (4, 16, 2, 16, True),
    ],
)
def test_a_group_spans_hosts_where_it_has_more_ranks_than_one_has(
    monkeypatch: pytest.MonkeyPatch,
    nnodes: int,
    tp_size: int,
    pp_size: int,
    group: int,
    *,
    spans: bool,
) -> None:
    run_on(monkeypatch, nnodes=nnodes, tp_size=tp_size, pp_size=pp_size)
    assert spans_hosts(group) is spans


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("draft", [False, True])
def test_pages_that_ranks_of_two_hosts_share_need_a_store_that_both_reach(
    tmp_path: Path, *, draft: bool
) -> None:
    cfg = families.config(tmp_path, tp=(1, 2), replicated=True)
    pools: dict[str, Any] = {"kv": zoo.mha_host() if draft else zoo.mla_host()}
    late = {"draft": zoo.mla_host(layers=1)} if draft else {}
    with (
        pytest.raises(NoRoute, match="host, not cluster") as refused,
        families.attached(cfg, pools, late),
    ):
        pass
    assert "shared_storage" in str(refused.value)


@pytest.mark.usefixtures("two_hosts")
def test_a_root_that_all_hosts_reach_is_taken_at_the_operators_word(
    tmp_path: Path,
) -> None:
    keys = families.hashes(1)
    pool = zoo.mla_host()
    for rank in (0, 1):
        cfg = families.config(
            tmp_path, tp=(rank, 2), replicated=True, extra={"shared_storage": True}
        )
        with families.attached(cfg, {"kv": pool}) as storage:
            assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
            assert storage.batch_exists(keys) == 1


@pytest.mark.usefixtures("two_hosts")
def test_heads_that_each_rank_has_for_itself_may_stay_on_its_host(
    tmp_path: Path,
) -> None:
    keys = families.hashes(1)
    pool = zoo.mha_host()
    for rank in (0, 1):
        cfg = families.config(tmp_path / str(rank), tp=(rank, 2))
        with families.attached(cfg, {"kv": pool}) as storage:
            assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
            assert storage.batch_exists(keys) == 1
