"""Real host pools of every family that SGLang 0.5.23 has, small ones.

Device pools lie in host memory as well; the host pools over them are the
classes that the engine builds, through their own constructors.
"""

from __future__ import annotations

import inspect
from functools import partial
from pkgutil import resolve_name as resolve
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache import memory_pool, memory_pool_host
from sglang.srt.mem_cache.pool_host import dsa, mamba, mha, mla
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

_INFO = "sglang.srt.mem_cache.device_pool_info"
_NVFP4 = "sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4"
# Looked up where they are used: an older release has fewer of them.

SLOTS = 256
PAGE = 16
PLAIN = {"pin_memory": False, "device": "cpu"}


def _info(pool: Any) -> Any:
    """Return what describes a device pool: in an older release it does so itself."""
    if not hasattr(pool, "get_device_pool_infos"):
        return pool
    return pool.get_device_pool_infos()[0].buffer_info


def _host(cls: Any, *args: Any, **options: Any) -> Any:
    """Build a host pool with those of the options that this release has."""
    known = inspect.signature(cls).parameters
    if options.get("draft_buffer_infos") and "draft_buffer_infos" not in known:
        raise NotImplementedError("this release packs drafts in another way")
    return cls(*args, **{key: one for key, one in options.items() if key in known})


def mha_host(
    layout: str = "page_first_direct",
    *,
    heads: int = 2,
    width: int = 8,
    v_width: int | None = None,
    layers: int = 3,
    packed_drafts: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
) -> Any:
    """Keys and values; another value width makes the asymmetric class."""

    def device(count: int) -> Any:
        return memory_pool.MHATokenToKVPool(
            size=SLOTS,
            page_size=page,
            dtype=dtype,
            head_num=heads,
            head_dim=width,
            v_head_dim=v_width,
            layer_num=count,
            device="cpu",
            enable_memory_saver=False,
        )

    pool = device(layers)
    info = _info(pool)
    host = _host(
        mha.get_mha_host_pool_cls(info),
        info,
        1.0,
        0,
        page,
        layout,
        device_capacity_tokens=SLOTS,
        start_layer=pool.start_layer,
        end_layer=pool.end_layer,
        draft_buffer_infos=tuple(_info(device(1)) for _ in range(packed_drafts)),
        **PLAIN,
    )
    host.test_device_pool = pool
    return host


def k_only_host(layout: str = "page_first_direct") -> Any:
    """Index keys of MiniMax's sparse attention."""
    device = memory_pool.MHATokenToKOnlyPool(
        size=SLOTS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    return mha.MHATokenToKOnlyPoolHost(device, mha_host(layout), layout, **PLAIN)


def mla_host(
    layout: str = "page_first_direct",
    *,
    layers: int = 3,
    dcp_rank: int = 0,
    dcp_size: int = 1,
    page: int = PAGE,
) -> Any:
    """Latent rows, whole or divided among decode-context-parallel ranks."""
    with get_parallel().override(attn_dcp_size=dcp_size, attn_dcp_rank=dcp_rank):
        pool = memory_pool.MLATokenToKVPool(
            size=SLOTS,
            page_size=page,
            dtype=torch.bfloat16,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        host = _host(
            mla.MLATokenToKVPoolHost,
            _info(pool),
            1.0,
            0,
            page * dcp_size,
            layout,
            device_capacity_tokens=SLOTS,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            target_layer_num=layers,
            dcp_rank=dcp_rank,
            dcp_size=dcp_size,
            **PLAIN,
        )
    host.test_device_pool = pool
    return host


def dsa_pair(layout: str = "page_first_direct") -> tuple[Any, Any]:
    """Latent rows with their indexer: the anchor and the sidecar."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        pool = memory_pool.DSATokenToKVPool(
            size=SLOTS,
            page_size=64,
            kv_lora_rank=32,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=3,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=40,
        )
        anchor = _host(
            mla.MLATokenToKVPoolHost,
            _info(pool),
            1.0,
            0,
            64,
            layout,
            device_capacity_tokens=SLOTS,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            target_layer_num=3,
            **PLAIN,
        )
        decl = dsa.make_dsa_indexer_pool_decl(pool)
        indexer = dsa.DSAIndexerPoolHost(decl=decl, anchor_host=anchor, **PLAIN)
    anchor.test_device_pool = indexer.test_device_pool = pool
    return anchor, indexer


def mamba_host(
    layout: str = "page_first_direct",
    *,
    layers: int = 2,
    temporal: tuple[int, ...] = (4, 8, 6),
    slots: int = 24,
) -> Any:
    """Recurrent states with two convolution states of different widths."""
    info = resolve(f"{_INFO}.MambaStateBufferInfo")(
        temporal=torch.zeros((layers, slots, *temporal)),
        conv=(
            torch.zeros((layers, slots, 12, 3), dtype=torch.bfloat16),
            torch.zeros((layers, slots, 6, 3), dtype=torch.bfloat16),
        ),
    )
    return mamba.MambaPoolHost(
        info, 1.0, 0, device_capacity=slots, layout=layout, **PLAIN
    )


def compressed_host(layout: str = "page_first_direct", name: str = "c4") -> Any:
    """Compressed KV pages of DeepSeek V4."""
    return memory_pool_host.DeepSeekV4PagedHostPool(
        name,
        [torch.zeros((SLOTS // PAGE, 576), dtype=torch.uint8) for _ in range(2)],
        576,
        SLOTS // PAGE,
        PAGE,
        layout,
        pin_memory=False,
    )


def state_host(layout: str = "page_first_direct") -> Any:
    """Ring states of DeepSeek V4's compression."""
    ring = 4
    pools = [
        SimpleNamespace(
            ring_size=ring,
            kv_score_buffer=SimpleNamespace(
                kv_score=torch.zeros((SLOTS // PAGE * ring, 10))
            ),
        )
        for _ in range(2)
    ]
    return memory_pool_host.DeepSeekV4StateHostPool(
        "c4_state", pools, SLOTS // PAGE, PAGE, layout, pin_memory=False
    )


def qsa_host(layout: str = "page_first_direct") -> Any:
    """Compressed index keys of QSA, four tokens in one, with a packed draft."""
    ratio, anchor = 4, mha_host(layout)
    keys = [torch.zeros((SLOTS // ratio, 1, 32), dtype=torch.bfloat16)] * 2
    pools = [
        SimpleNamespace(qsa_compress_ratio=ratio, qsa_compressed_k_buffer_pool=own)
        for own in (keys, keys[:1])
    ]
    qsa = resolve("sglang.srt.mem_cache.pool_host.qsa.QSAIndexerPoolHost")
    return qsa(pools[0], anchor, mtp_draft_device_pools=tuple(pools[1:]))


def _page_rows(row_bytes: int) -> Any:
    slab = torch.zeros((3, SLOTS // PAGE, row_bytes), dtype=torch.uint8)
    return resolve(f"{_INFO}.PageRowBufferInfo")(
        slab=slab,
        rows=tuple(slab),
        row_bytes=row_bytes,
        page_size=PAGE,
        num_pages=SLOTS // PAGE,
    )


def nvfp4_host(layout: str = "page_first_direct") -> Any:
    """Payloads and scales of MiniMax's four-bit keys and values, one row a page."""
    host = resolve(f"{_NVFP4}.MiniMaxM3Nvfp4MainKVPoolHost")(
        _page_rows(1152),
        1.0,
        0,
        PAGE,
        layout,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=3,
        **PLAIN,
    )
    host.test_device_pool = SimpleNamespace(start_layer=0, end_layer=3)
    return host


def nvfp4_index_host(layout: str = "page_first_direct") -> Any:
    """Index keys beside them."""
    return resolve(f"{_NVFP4}.MiniMaxM3Nvfp4IndexKPoolHost")(
        _page_rows(288), nvfp4_host(layout), layout, start_layer=0, end_layer=3, **PLAIN
    )


def logical_host() -> Any:
    """An anchor that counts pages and has no bytes."""
    return memory_pool_host.LogicalHostPool(SLOTS, PAGE)


PAGE_LAYOUTS = ("page_first", "page_first_direct")
LAYOUTS = ("layer_first", *PAGE_LAYOUTS)


def _each(
    family: str,
    name: str,
    build: Callable[..., Any],
    layouts: tuple[str, ...],
    **more: Any,
) -> dict[str, tuple[str, Callable[[], Any]]]:
    return {
        f"{family}-{layout}": (name, partial(build, layout, **more))
        for layout in layouts
    }


def indexer_host(layout: str) -> Any:
    """The sidecar of `dsa_pair` alone."""
    return dsa_pair(layout)[1]


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    **_each("mha", "kv", mha_host, (*LAYOUTS, "page_head")),
    **_each("asymmetric", "kv", mha_host, PAGE_LAYOUTS, v_width=4),
    "packed-draft": ("kv", partial(mha_host, packed_drafts=2)),
    **_each("k_only", "indexer", k_only_host, LAYOUTS),
    **_each("mla", "kv", mla_host, LAYOUTS),
    "mla-dcp": ("kv", partial(mla_host, dcp_size=2, dcp_rank=1)),
    "mla-dcp-layer_first": ("kv", partial(mla_host, "layer_first", dcp_size=2)),
    **_each("indexer", "indexer", indexer_host, LAYOUTS),
    **_each("mamba", "mamba", mamba_host, PAGE_LAYOUTS),
    "mamba-conv-only": ("mamba", partial(mamba_host, temporal=(0,))),
    "swa": ("swa", mha_host),
    "draft-mha": ("draft", partial(mha_host, layers=1)),
    "draft-mla": ("draft", partial(mla_host, layers=1)),
    **_each("compressed", "deepseek_v4_c4", compressed_host, LAYOUTS),
    **_each("qsa", "indexer", qsa_host, LAYOUTS),
    **_each("nvfp4", "kv", nvfp4_host, LAYOUTS),
    **_each("nvfp4-index", "indexer", nvfp4_index_host, LAYOUTS),
    **_each("state", "deepseek_v4_c4_state", state_host, LAYOUTS),
}
"""Family to the name under which the engine registers it, and its builder."""


def page_slots(pool: Any) -> int:
    """Host slots of one page, as the engine hands them over."""
    return int(pool.page_size) * int(getattr(pool, "dcp_size", 1))


def buffers(pool: Any) -> list[torch.Tensor]:
    """All memory of a pool, as bytes."""
    for name in ("temporal_buffer", "index_k_with_scale_buffer"):
        if hasattr(pool, name):
            extra = pool.conv_buffer if name == "temporal_buffer" else []
            found = [getattr(pool, name), *extra]
            break
    else:
        kv = getattr(pool, "kv_buffer", None)
        kv = pool.k_buffer if kv is None else kv
        found = list(kv) if isinstance(kv, list | tuple) else [kv]
    return [one.view(torch.uint8).reshape(-1) for one in found if one.numel()]


def fill(pool: Any, seed: int) -> None:
    """Fill a pool's memory with bytes that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for one in buffers(pool):
        one.random_(0, 256, generator=generator)


def snapshot(pool: Any) -> list[torch.Tensor]:
    """Copy a pool's memory."""
    return [one.clone() for one in buffers(pool)]


def page(pool: Any, index: int) -> torch.Tensor:
    """Return a copy of a page's bytes by the engine's own account."""
    at = index * page_slots(pool)
    if hasattr(pool, "k_buffer") and isinstance(
        pool, mha.AsymmetricMHATokenToKVPoolHost
    ):
        first = index * PAGE if pool.layout == "page_first" else index
        last = first + (PAGE if pool.layout == "page_first" else 1)
        pieces = [pool.k_buffer[first:last], pool.v_buffer[first:last]]
        return torch.cat([one.contiguous().view(torch.uint8).ravel() for one in pieces])
    found = pool.get_data_page(at, flat=True)
    flat: torch.Tensor = found.contiguous().view(torch.uint8).reshape(-1)
    return flat.clone()


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the host slots of pages, as the engine hands them over."""
    n = page_slots(pool)
    return torch.cat([torch.arange(p * n, (p + 1) * n) for p in pages]).to(torch.int64)
