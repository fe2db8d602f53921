"""What a group keeps and what is looked for, where vLLM need not be installed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import SettingsError
from kvdock_vllm.restorable import check_rows, check_states, window_reason
from kvdock_vllm.rows import Group


def group(name: str, tokens: int) -> Group:
    return Group(
        number=0,
        spec_class=name,
        spec="",
        layers=("a",),
        tokens=tokens,
        pieces=((0, 100),),
    )


def test_several_blocks_of_states_in_one_page_are_rejected() -> None:
    check_states([group("MambaSpec", 64)], 1)
    with pytest.raises(SettingsError, match=r"is 2, .*--mamba-block-size \(now 64\)"):
        check_states([group("MambaSpec", 128)], 2)
    check_states([group("FullAttentionSpec", 128)], 2)


def test_host_memory_for_less_than_a_step_is_rejected_with_the_least() -> None:
    groups = [
        SimpleNamespace(tokens_per_chunk=32, sliding_window_size_in_chunks=None),
        SimpleNamespace(tokens_per_chunk=32, sliding_window_size_in_chunks=2),
    ]
    check_rows(groups, 33, 4096, 1024)
    with pytest.raises(SettingsError, match=r"32 rows.*stores 33.*132\.0 KiB"):
        check_rows(groups, 32, 4096, 1024)


@given(
    window=st.integers(2, 1 << 17),
    block=st.sampled_from([1, 8, 16, 32, 64, 128]),
    blocks=st.integers(1, 16),
)
def test_a_window_is_never_restored_where_more_is_asked_for_than_kept(
    window: int, block: int, blocks: int
) -> None:
    page = block * blocks
    kept, asked = -(-(window - 1) // page), -(-window // page)
    said = window_reason("w", window, block, blocks)
    assert bool(said) == (kept != asked)
    if said:
        assert f"keeps {kept} of a window of {window} tokens and asks for {asked}" in (
            said
        )
        if better := re.search(r'"blocks_per_chunk": (\d+)', said):
            assert not window_reason("w", window, block, int(better[1]))
