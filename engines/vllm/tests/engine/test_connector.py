"""What is rejected where the command was typed, before weights load."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import vllm_models

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_lives import Lives

Configure = Callable[..., Any]


@pytest.fixture
def configure(lives: Lives) -> Configure:
    """Return what makes vLLM's configuration, as the process that is started does."""
    # Importing vLLM makes torch warn of itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
    model = vllm_models.make(vllm_models.FAMILIES["llama"], lives.models)

    def made(
        extra: dict[str, Any], connector: str = "KvdockConnector", **given: Any
    ) -> Any:
        transfer = KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
        )
        arguments: Any = EngineArgs(
            model=str(model), kv_transfer_config=transfer, block_size=32, **given
        )
        return arguments.create_engine_config()

    return made


GIVEN = {"plugin": "file", "host_memory": "10 GiB"}
WRONG = [
    ({**GIVEN, "plugin": "fiel"}, "Did you mean 'file'"),
    ({**GIVEN, "rot": "/kv"}, "Did you mean 'root'"),
    ({**GIVEN, "root": "/kv", "eviction_policy": "lur"}, "Did you mean 'lru'"),
    ({**GIVEN, "root": "/kv", "host_memory": "10"}, "'10 GiB'"),
    ({**GIVEN, "root": f"{__file__}/kv"}, "not a directory"),
]


@pytest.mark.parametrize(("extra", "said"), WRONG)
@pytest.mark.parametrize("eager", [True, False])
def test_wrong_settings_are_rejected_where_the_command_was_typed(
    configure: Configure, extra: dict[str, Any], said: str, *, eager: bool
) -> None:
    with pytest.raises(KvdockError, match=said):
        configure(extra, enforce_eager=eager)


def test_settings_behind_another_connector_are_checked_too(
    configure: Configure,
) -> None:
    extra, said = WRONG[0]
    inner = {
        "kv_connector": "KvdockConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    with pytest.raises(KvdockError, match=said):
        configure({"connectors": [inner]}, "MultiConnector")


@pytest.mark.parametrize(
    ("neighbour", "allowed"),
    [
        ({"kv_connector": "NixlConnector"}, True),
        ({"kv_connector": "OffloadingConnector"}, True),
        ({"kv_connector": "LMCacheConnectorV1"}, False),
        ({"kv_connector": "DecodeBenchConnector"}, False),
        (
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]},
            },
            False,
        ),
        (
            {
                "kv_connector": "NixlConnector",
                "kv_connector_module_path": "vllm.distributed.kv_transfer"
                ".kv_connector.v1.nixl",
            },
            False,
        ),
    ],
)
def test_neighbours_that_load_pages_of_others_are_rejected(
    configure: Configure, tmp_path: Path, neighbour: dict[str, Any], *, allowed: bool
) -> None:
    ours = {
        "kv_connector": "KvdockConnector",
        "kv_connector_extra_config": {**GIVEN, "root": str(tmp_path)},
    }
    among = [{"kv_role": "kv_both", **one} for one in (neighbour, ours)]
    if allowed:
        assert configure({"connectors": among}, "MultiConnector")
        return
    with pytest.raises(KvdockError, match="beside KvdockConnector"):
        configure({"connectors": among}, "MultiConnector")


def test_hashes_of_one_process_are_rejected_there(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    given = {**GIVEN, "root": str(tmp_path)}
    assert configure(given)
    with pytest.raises(KvdockError, match="PYTHONHASHSEED"):
        configure(given, prefix_caching_hash_algo="xxhash")


def test_what_other_connectors_are_given_is_theirs(configure: Configure) -> None:
    assert configure({"plugin": "fiel"}, "ExampleConnector")
