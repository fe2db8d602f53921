"""What an engine's configuration says of its pages, and what it must not leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.errors import KvdockError, SettingsError
from kvdock_vllm.identity import FORMAT, identify, read
from kvdock_vllm.settings import collect

OWN = collect({"plugin": "file", "host_memory": "1 MiB"}, environ={}).own


@pytest.fixture
def config(tmp_path: Any) -> Any:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    given: dict[str, Any] = {}
    for field in FORMAT.values():
        *group, name = field.split(".")
        below = given
        for one in group:
            below = below.setdefault(one, {})
        below[name] = 1
    given["model_config"] |= {
        "model": str(tmp_path),
        "revision": None,
        "hf_config": SimpleNamespace(),
        "hf_overrides": {},
    }
    given["cache_config"]["prefix_caching_hash_algo"] = "sha256"
    given["parallel_config"] |= {"nnodes_within_dp": 1, "data_parallel_index": 0}
    given["speculative_config"] = None
    given["weight_transfer_config"] = None
    return SimpleNamespace(
        **{
            name: SimpleNamespace(**value) if isinstance(value, dict) else value
            for name, value in given.items()
        }
    )


@pytest.fixture
def plan() -> Any:
    """Return vLLM's plan of an engine without groups."""
    return SimpleNamespace(
        hisparse_host_num_blocks=None,
        prefix_cacheable_group_ids=(),
        kv_cache_groups=[],
        kv_cache_tensors=[],
    )


@pytest.mark.parametrize("field", list(FORMAT.values()))
def test_each_field_that_decides_about_bytes_makes_another_namespace(
    field: str, config: Any, plan: Any
) -> None:
    before = identify(config, plan, OWN).namespace(OWN)
    *group, name = field.split(".")
    changed = read(config, group[0]) if group else config
    others = {"prefix_caching_hash_algo": "sha256_cbor", "hf_overrides": {"a": 1}}
    setattr(changed, name, others.get(name, 2))
    assert identify(config, plan, OWN).namespace(OWN) != before


@pytest.mark.parametrize("field", list(FORMAT.values()))
def test_a_field_that_a_vllm_does_not_have_is_an_error(
    field: str, config: Any, plan: Any
) -> None:
    *group, name = field.split(".")
    delattr(read(config, group[0]) if group else config, name)
    with pytest.raises(KvdockError, match=field):
        identify(config, plan, OWN)


def test_hashes_with_a_seed_of_one_process_are_rejected(
    config: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(SettingsError, match="PYTHONHASHSEED"):
        identify(config, plan, OWN)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    identify(config, plan, OWN)


def test_ranks_on_several_hosts_are_rejected(config: Any, plan: Any) -> None:
    config.parallel_config.nnodes_within_dp = 2
    with pytest.raises(SettingsError, match="2 hosts"):
        identify(config, plan, OWN)


def test_weights_that_are_replaced_at_run_time_are_rejected(
    config: Any, plan: Any
) -> None:
    config.weight_transfer_config = SimpleNamespace(backend="nccl")
    with pytest.raises(SettingsError, match="weight_transfer_config"):
        identify(config, plan, OWN)


def test_overrides_that_are_a_function_are_rejected(config: Any, plan: Any) -> None:
    config.model_config.hf_overrides = lambda given: given
    with pytest.raises(KvdockError, match="hf_overrides is a function"):
        identify(config, plan, OWN)


def test_other_weights_of_a_draft_are_another_namespace(
    config: Any, plan: Any, tmp_path: Any
) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"draft")
    config.speculative_config = SimpleNamespace(
        method="draft_model",
        draft_model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            hf_config=SimpleNamespace(),
            dtype="f",
            quantization=None,
        ),
    )
    before = identify(config, plan, OWN)
    (folder / "model.safetensors").write_bytes(b"other")
    assert identify(config, plan, OWN).draft != before.draft
    assert before.draft.startswith("draft_model draft files:")
