"""A prompt restored by vLLM through a storage class that SGLang ships."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_families import check, check_altered, tell

if TYPE_CHECKING:
    from vllm_lives import Lives

pytest.importorskip("kvdock_hicache")


def test_vllm_restores_a_prompt_through_sglangs_file_class(
    lives: Lives, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    given = {
        "plugin": "hicache",
        "storage_class": "sglang.srt.mem_cache.hicache_storage:HiCacheFile",
        "extra_config": {"file_storage_path": str(store)},
        "memory": "32 MiB",
        # Two cores may be shared with other suites.
        "core": {"deadlines": {"exists": "30 s", "get": "60 s", "put": "60 s"}},
    }
    story = tell(lives, "hicache", ("llama",), given)
    check("llama", story)
    check_altered("llama", story)
    assert story.restored["llama"]["routes"] == {"kv": "hicache"}
    assert any(store.iterdir())
