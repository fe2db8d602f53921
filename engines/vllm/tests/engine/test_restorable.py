"""A cache that would never hit is noticed before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvdock.errors import SettingsError
from kvdock_vllm.restorable import (
    check_rows,
    host_memory_words,
    loadable_tokens,
    unrestorable,
)

if TYPE_CHECKING:
    from vllm_lives import Lives


def scheduler(*specs: Any, blocks_per_chunk: int = 1, retention: int | None = 0) -> Any:
    """Return vLLM's own side of the connector, for groups of these specifications."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (
        scheduler as upstream,
    )
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    groups = []
    for number, spec in enumerate(specs):
        tokens = spec.block_size * blocks_per_chunk
        groups.append(
            upstream.GroupOffloadConfig(
                group_idx=number,
                tokens_per_block=spec.block_size,
                tokens_per_chunk=tokens,
                hashes_per_chunk=1,
                kv_event_group_spec=None,
                sliding_window_size_in_chunks=(
                    upstream.get_sliding_window_size_in_chunks(spec, tokens)
                ),
                kv_cache_spec=spec,
                manager_cls=KVCacheSpecRegistry.get_manager_class(spec),
            )
        )
    made = object.__new__(upstream.OffloadingConnectorScheduler)
    made.config = upstream.SchedulerOffloadConfig(
        kv_group_configs=tuple(groups),
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=1,
        num_workers=1,
        offload_prompt_only=False,
        supports_partial_tail=False,
        alignment_tokens=specs[0].block_size * blocks_per_chunk,
        retention_interval=retention,
    )
    windows = [one.sliding_window_size_in_chunks for one in groups]
    whole = tuple(n for n, one in enumerate(windows) if one is None)
    made._full_attention_groups = whole
    made._sliding_window_groups = tuple(set(range(len(groups))) - set(whole))
    made._lookup_groups = whole + made._sliding_window_groups
    made._mamba_align_size = None
    made._chunks_being_loaded = None
    return made


def full(block: int = 32) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(**_attention(block))


def window(tokens: int, block: int = 32) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(sliding_window=tokens, **_attention(block))


def _attention(block: int) -> dict[str, Any]:
    import torch

    return {
        "block_size": block,
        "num_kv_heads": 1,
        "head_size": 32,
        "dtype": torch.float32,
    }


@pytest.mark.parametrize(
    "specs",
    [
        (full(),),
        (full(), window(64)),
        (window(64),),
        (full(), window(100)),
        (full(), window(32), window(512)),
    ],
    ids=["full", "both", "window", "odd", "two"],
)
def test_ordinary_groups_are_restorable(specs: Any) -> None:
    assert unrestorable(scheduler(*specs)) == ""
    assert unrestorable(scheduler(*specs, blocks_per_chunk=2)) == ""
    assert unrestorable(scheduler(*specs, retention=None)) == ""


def test_a_window_one_past_a_multiple_of_the_chunk_is_said_with_a_way_out() -> None:
    said = unrestorable(scheduler(full(), window(65)))
    assert "window of 65 tokens and asks for 3" in said
    assert "keeps 2" in said
    assert '"blocks_per_chunk": 3' in said
    assert unrestorable(scheduler(full(), window(65), blocks_per_chunk=3)) == ""


def test_a_release_with_other_names_is_not_rejected() -> None:
    broken = scheduler(full(), window(65))
    broken.config = SimpleNamespace(kv_group_configs=broken.config.kv_group_configs)
    assert unrestorable(broken) == ""


def test_host_memory_for_less_than_a_step_is_rejected_with_the_least() -> None:
    made = scheduler(full(), window(64)).config.kv_group_configs
    check_rows(made, 33, 4096, 1024)
    with pytest.raises(SettingsError, match=r"32 rows.*stores 33.*132\.0 KiB"):
        check_rows(made, 32, 4096, 1024)


@pytest.mark.parametrize(
    ("groups", "rows", "tokens"),
    [
        ([(32, None)], 64, 2048),
        # A page of 64 tokens takes a row of one group and two of the other.
        ([(32, None), (64, None)], 64, 1344),
        ([(32, None), (32, 2)], 64, 1952),
        ([(32, 4)], 64, 0),
    ],
)
def test_the_prefix_that_rows_can_hold_is_known(
    groups: list[tuple[int, int | None]], rows: int, tokens: int
) -> None:
    made = [
        SimpleNamespace(tokens_per_chunk=size, sliding_window_size_in_chunks=window)
        for size, window in groups
    ]
    assert loadable_tokens(made, rows) == tokens
    said = host_memory_words(made, rows)
    assert (f" {tokens} tokens " in said) == bool(tokens)
    window = tokens and any(size for _, size in groups)
    assert ("window or state" in said) == bool(window)


@pytest.fixture(scope="module")
def tried(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Start engines whose caches would never hit; return what each did."""
    root = tmp_path_factory.mktemp("never")
    root.chmod(0o700)
    storage = {"plugin": "file", "root": str(root), "free_space": "1 MiB"}
    states = {**storage, "blocks_per_chunk": 2}
    little = {**storage, "host_memory": "128 KiB"}
    phases = [
        lives.phase("mamba2", "states", states, may_fail=True),
        lives.phase("llama", "little", little, may_fail=True),
        lives.phase("window_past", "window", storage),
    ]
    found = lives.run("never", phases)
    found["log"] = (lives.folder / "never.log").read_text()
    return found


@pytest.mark.slow
def test_an_engine_whose_states_never_come_back_does_not_start(
    tried: dict[str, Any],
) -> None:
    assert "blocks_per_chunk is 2" in tried["states"]["error"]
    assert "host_memory has 8 rows" in tried["little"]["error"]


@pytest.mark.slow
def test_an_engine_whose_windows_never_come_back_says_so(
    tried: dict[str, Any],
) -> None:
    assert "prompts longer than the window are never restored" in tried["log"]
    assert '"blocks_per_chunk": 2' in tried["log"]
