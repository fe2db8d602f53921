"""One engine on several hosts: what one rank stores, the others must find."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_families as families
import tiny_models
import zoo
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from kvdock.errors import NoRoute
from kvdock_sglang import storage
from kvdock_sglang.namespace import ranks_on_host, target_kv_heads


def run_on(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Let the engine believe in hosts; its own objects reject half a truth."""
    found = SimpleNamespace(**sizes)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: found)


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, nnodes=2, tp_size=2, pp_size=1)


@pytest.mark.parametrize(
    ("nnodes", "tp_size", "pp_size", "group", "there"),
    [
        (1, 8, 1, 8, 8),
        (2, 16, 1, 16, 8),
        # Each stage has a host of its own, and so has each attention group.
        (2, 8, 2, 8, 8),
        (2, 16, 1, 8, 8),
        (2, 16, 1, 1, 1),
        (4, 16, 2, 16, 8),
    ],
)
def test_ranks_of_a_group_are_divided_among_hosts_as_the_engine_does(
    monkeypatch: pytest.MonkeyPatch,
    nnodes: int,
    tp_size: int,
    pp_size: int,
    group: int,
    there: int,
) -> None:
    run_on(monkeypatch, nnodes=nnodes, tp_size=tp_size, pp_size=pp_size)
    assert ranks_on_host(group) == there


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("draft", [False, True])
def test_pages_that_ranks_of_two_hosts_share_need_a_store_that_both_reach(
    tmp_path: Path, *, draft: bool
) -> None:
    cfg = families.config(tmp_path, tp=(1, 2), replicated=True)
    pools: dict[str, Any] = {"kv": zoo.mha_host() if draft else zoo.mla_host()}
    late = {"draft": zoo.mla_host(layers=1)} if draft else {}
    with (
        pytest.raises(NoRoute, match="host, not cluster") as rejected,
        families.attached(cfg, pools, late),
    ):
        pass
    assert "shared_storage" in str(rejected.value)


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
        with families.attached(cfg, {"kv": pool}) as made:
            assert made.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
            assert made.batch_exists(keys) == 1


@pytest.mark.usefixtures("two_hosts")
def test_heads_that_each_rank_has_for_itself_may_stay_on_its_host(
    tmp_path: Path,
) -> None:
    keys = families.hashes(1)
    pool = zoo.mha_host()
    for rank in (0, 1):
        cfg = families.config(tmp_path / str(rank), tp=(rank, 2))
        with families.attached(cfg, {"kv": pool}) as made:
            assert made.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
            assert made.batch_exists(keys) == 1


@pytest.mark.parametrize(("heads", "rejected"), [(2, False), (1, True)])
def test_heads_that_ranks_of_one_host_share_need_no_more_than_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heads: int, *, rejected: bool
) -> None:
    """Four ranks on two hosts: two heads are held by neighbours, one by all."""
    run_on(monkeypatch, nnodes=2, tp_size=4, pp_size=1)
    monkeypatch.setattr(storage, "target_kv_heads", lambda: heads)
    cfg = families.config(tmp_path, tp=(1, 4))
    expected = pytest.raises(NoRoute) if rejected else nullcontext()
    with expected, families.attached(cfg, {"kv": zoo.mha_host(heads=1)}):
        pass


def test_the_heads_of_the_target_are_those_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ServerArgs(
        model_path=str(tiny_models.make("llama", tmp_path)), device="cpu"
    )
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    config = json.loads((Path(arguments.model_path) / "config.json").read_text())
    assert target_kv_heads() == config["num_key_value_heads"]
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: None)
    assert target_kv_heads() == 0
