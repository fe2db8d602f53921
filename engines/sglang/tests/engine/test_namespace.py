"""What a process of the engine is called, and what its pages belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt import runtime_context

from kvdock import AttachConfig
from kvdock.errors import KvdockError
from kvdock_sglang import engine_api
from kvdock_sglang.engine_api import LAUNCH_ARGUMENTS
from kvdock_sglang.namespace import Ranks, launch_arguments, namespace
from kvdock_sglang.settings import AdapterSettings

if TYPE_CHECKING:
    from kvdock import Namespace


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
        tp_lcm_size=None,
    )
    return Ranks.of(config)


def test_every_process_of_an_engine_has_a_name_of_its_own_and_keeps_it() -> None:
    """They have one configuration, and most of them equal shards."""
    processes = [ranks(*one) for one in product(range(2), repeat=4)]
    names = [one.process for one in processes]
    assert len(set(names)) == 16
    assert len({one.shard for one in processes}) == 2
    assert names[5] == "dp0-pp1-cp0-tp1" == ranks(0, 1, 0, 1).process
    assert [AttachConfig(process=name).process for name in names] == names


def test_a_replica_shares_the_pages_of_the_others() -> None:
    assert ranks(0, 0, 0, 1).shard == ranks(1, 0, 0, 1).shard


WEIGHTS = {
    "load_format": "dummy",
    "model_loader_extra_config": '{"presharded_path": "/other"}',
    "custom_weight_loader": ["package.load"],
    "weight_version": "2",
    "quantization": "fp8",
    "modelopt_quant": "fp8",
    "modelopt_checkpoint_restore_path": "/restored",
    "rl_quant_profile": "/profile",
    "kt_weight_path": "/experts",
    "qsa_indexer_dtype": "fp8_e4m3",
    "speculative_draft_load_format": "dummy",
    "speculative_draft_model_quantization": "fp8",
    "uno_lora_path": "/draft",
}
"""Launch arguments that make other weights or rows of the same files."""


def launched(**changes: object) -> SimpleNamespace:
    """Return launch arguments; a change to `...` leaves one out."""
    given = {**dict.fromkeys(LAUNCH_ARGUMENTS), "model_path": "/model", **changes}
    return SimpleNamespace(**{k: v for k, v in given.items() if v is not ...})


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """Return the namespace of an engine with these launch arguments."""

    def found(**changes: object) -> Namespace:
        arguments = launched(**changes)
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
        mine = AdapterSettings(plugin="file")
        return namespace("served", ranks(0, 0, 0, 0), mine, launch_arguments())

    return found


@pytest.mark.parametrize("argument", WEIGHTS)
def test_other_weights_of_one_path_are_another_namespace(
    argument: str, of: Callable[..., Namespace]
) -> None:
    assert of(**{argument: WEIGHTS[argument]}) != of()


@pytest.mark.parametrize("argument", ["quantization", "weight_version", "model_path"])
def test_a_launch_argument_that_is_missing_is_named_and_stops_the_engine(
    argument: str, of: Callable[..., Namespace]
) -> None:
    with pytest.raises(KvdockError, match=f"the launch arguments {argument}"):
        of(**{argument: ...})


def test_launch_arguments_that_moved_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(runtime_context, "get_server_args")
    with pytest.raises(KvdockError, match=r"runtime_context\.get_server_args"):
        engine_api.check()


def test_the_version_is_part_of_the_namespace_unless_it_is_a_tested_one(
    monkeypatch: pytest.MonkeyPatch, of: Callable[..., Namespace]
) -> None:
    tested = of()
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23.post1")
    untested = of()
    assert "0.5.23" not in tested.page_format
    assert json.loads(untested.page_format)["engine_version"] == "0.5.23.post1"


def test_this_sglang_has_everything_that_storage_uses() -> None:
    assert engine_api.missing(engine_api.STORAGE) == ()
