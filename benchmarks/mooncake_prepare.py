"""Time public calls of SGLang's MooncakeStore for a batch of four pools.

Started by benchmarks/mooncake.py with an interpreter that has SGLang 0.5.23. The
store answers at once, so what is timed is all that SGLang does around it. A line
"set" or "get" on standard input makes one call of 128 pages; the answer is a line
with its seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

PAGES, PAGE_TOKENS, LAYERS = 128, 64, 4
SIDECARS = (PoolName.DRAFT, PoolName.SWA, PoolName.DRAFT_SWA)


class InstantStore:
    """Answers as the library does, without doing anything."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Find nothing."""
        return [0] * len(keys)

    def batch_put_from(self, keys: list[str], *_: object) -> list[int]:
        """Store nothing."""
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], *_: object) -> list[int]:
        """Load nothing."""
        return [1] * len(keys)


def host_pool() -> Any:  # noqa: ANN401 - SGLang chooses the class
    """Make a host pool of keys and values, page after page."""
    slots = PAGES * PAGE_TOKENS
    device = memory_pool.MHATokenToKVPool(
        size=slots,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    return mha.get_mha_host_pool_cls(info)(
        info,
        2.0,
        0,
        PAGE_TOKENS,
        "page_first_direct",
        device_capacity_tokens=slots,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        draft_buffer_infos=(),
        pin_memory=False,
        device="cpu",
    )


def storage() -> MooncakeStore:
    """Make a MooncakeStore around the instant store, as its setup leaves it."""
    made = MooncakeStore.__new__(MooncakeStore)
    made.store = InstantStore()
    made.mem_pool_host = host_pool()
    made.registered_pools = {name: host_pool() for name in SIDECARS}
    made.config_prefix = "org-model"
    made.mha_suffix, made.mla_suffix = "0", ""
    made.is_mla_backend = made.should_split_heads = False
    made.enable_storage_metrics = False
    made.dcp_size, made.pp_size, made.local_rank = 1, 1, 0
    made.enable_group_semantics = made._use_group_semantics = False  # noqa: SLF001 - as its own setup
    made._supports_group_ids = made._supports_session_ids = False  # noqa: SLF001 - as its own setup
    return made


def main() -> None:
    """Make a call for each line of standard input."""
    store = storage()
    hashes = [f"{page:064x}" for page in range(PAGES)]
    slots = torch.arange(PAGES * PAGE_TOKENS, dtype=torch.int64)
    transfers = [
        PoolTransfer(name=name, host_indices=slots, keys=hashes) for name in SIDECARS
    ]
    calls = {
        "set": (store.batch_set_v1, store.batch_set_v2),
        "get": (store.batch_get_v1, store.batch_get_v2),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        v1, v2 = calls[line.strip()]
        began = time.perf_counter()
        kv = v1(hashes, slots)
        rest = v2(transfers)
        seconds = time.perf_counter() - began
        if not all(kv) or not all(all(one) for one in rest.values()):
            raise SystemExit(f"{line.strip()} did not succeed")
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
