"""Code of SGLang's host pools whose pages were probed.

`make test-sglang-releases ARGS=--write` writes this file, after every value of
every pool was found where the releases before keep it.
"""

from __future__ import annotations

PROBED_CODE: dict[str, tuple[str, ...]] = {
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost": (
        "13024fbeaf011b973bb7a73b1a49b1af",
    ),
    "sglang.srt.mem_cache.pool_host.mha.AsymmetricMHATokenToKVPoolHost": (
        "0024018d3a45335e8615019f94cd3596",
    ),
    "sglang.srt.mem_cache.pool_host.mha.MHATokenToKOnlyPoolHost": (
        "115b314d71272da1d4599303faa776a5",
    ),
    "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost": (
        "44f75fed9d71bccb3e6df0a25ef24c49",
    ),
    "sglang.srt.mem_cache.pool_host.dsa.DSAIndexerPoolHost": (
        "9e0ac499f004ee95650f87cf2d02aeea",
    ),
    "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost": (
        "778db41c266245f4bdbb1eac3e0144e7",
    ),
    "sglang.srt.mem_cache.pool_host.qsa.QSAIndexerPoolHost": (
        "c87e729ae310d50432903320f02fb4d8",
    ),
    "sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4.MiniMaxM3Nvfp4IndexKPoolHost": (
        "5e0464660567dd47d2f26844d46c219b",
    ),
    "sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4.MiniMaxM3Nvfp4MainKVPoolHost": (
        "83c5756012a80e9e2227fb750e9400b5",
    ),
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4PagedHostPool": (
        "93d26cf63cff473ab4f86b2c21ed6c5e",
    ),
    "sglang.srt.mem_cache.memory_pool_host.DeepSeekV4StateHostPool": (
        "3bfe9dfc929dd0bd41b06134c1a02058",
    ),
    "sglang.srt.mem_cache.memory_pool_host.LogicalHostPool": (
        "b354e66f50b29beeec01b83ed0a268ae",
    ),
}
"""Class to digests of its code, one for each way in which a release wrote it."""
