"""vLLM's keys of pages that storage has reported."""

from __future__ import annotations

from kvdock_vllm.events import StoredKeys


def test_keys_are_the_block_hash_and_the_group_of_the_pool() -> None:
    stored = StoredKeys({0: "kv", 2: "mamba"}, limit=8)
    assert stored.keys("mamba", ["ab01"]) == [bytes.fromhex("ab0100000002")]


def test_pages_of_an_adapter_have_the_block_hashes_that_vllm_knows() -> None:
    stored = StoredKeys({0: "kv"}, limit=2)
    stored.note_adapter_hashes(["a1", "a2", "a3"], ["01", "02", "03"])
    group = bytes(4)
    assert stored.keys("kv", ["a2", "a3", "04"]) == [
        b"\2" + group,
        b"\3" + group,
        b"\4" + group,
    ]
    # The oldest are forgotten.
    assert stored.keys("kv", ["a1"]) == [b"\xa1" + group]
