"""What a process of the engine is called, and what its pages belong to."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from kvdock.plugin.hookspecs import AttachConfig
from kvdock_sglang.namespace import STARTED_WITH, Ranks, namespace, started_with
from kvdock_sglang.settings import AdapterSettings


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


WEIGHTS = {
    "load_format": "dummy",
    "quantization": "fp8",
    "modelopt_quant": "fp8",
    "rl_quant_profile": "/profile",
    "kt_weight_path": "/experts",
    "speculative_draft_load_format": "dummy",
    "speculative_draft_model_quantization": "fp8",
}
"""Launch arguments that make other weights of the same files."""


@pytest.mark.parametrize("argument", WEIGHTS)
def test_other_weights_of_one_path_are_another_namespace(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**arguments: str) -> object:
        told = SimpleNamespace(model_path="/model", **arguments)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: told)
        mine = AdapterSettings(plugin="file")
        return namespace("served", ranks(0, 0, 0, 0), mine, started_with())

    assert found(**{argument: WEIGHTS[argument]}) != found()


def test_all_launch_arguments_that_are_read_are_some_of_the_engines() -> None:
    assert [name for name in STARTED_WITH if not hasattr(ServerArgs, name)] == []
