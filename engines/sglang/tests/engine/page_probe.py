"""Where known values lie in a page, after SGLang's own code has moved them there.

Every row of a device pool gets bytes that nothing else has. The engine's own copy
brings a page of them to the host pool, and the page is read as storage sees it. A
digest of that says what lies where: axes, order, padding and scales. It is the same
in every release that stores a pool's pages in the same way.
"""

from __future__ import annotations

import builtins
import ctypes
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zoo

from kvdock import Shard
from kvdock_sglang.host_pools import EngineContext, describe

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def digest_of(family: str) -> str:
    """Return the digest of what lies where in a page of a family's pool."""
    name, build = zoo.FAMILIES[family]
    pool = build()
    for label, rows in device_rows(pool):
        _mark(label, rows)
    slots = torch.arange(zoo.page_slots(pool), dtype=torch.int64)
    io = "kernel" if pool.layout in ("page_first", "page_head") else "direct"
    device = getattr(pool, "test_device_pool", None) or getattr(
        pool, "device_pool", None
    )
    pool.backup_from_device_all_layer(device, slots, slots, io)
    dcp = int(getattr(pool, "dcp_size", 1))
    rank = int(getattr(pool, "dcp_rank", 0))
    shard = Shard(tp_rank=rank, tp_size=dcp, dcp_rank=rank, dcp_size=dcp)
    region = describe(
        name, pool, EngineContext(shard=shard, page_tokens=zoo.page_slots(pool))
    ).region
    page = np.zeros((1, int(region.object_bytes.sum())), np.uint8)
    region.gather([0], page)
    return hashlib.sha256(page.tobytes()).hexdigest()[:32]


def device_rows(pool: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a pool's pages come from, one for each layer and part."""
    if hasattr(pool, "conv_buffer"):
        info = getattr(pool, "buffer_info", None) or pool.device_pool.mamba_cache
        for number, tensor in enumerate((info.temporal, *info.conv)):
            for layer, rows in enumerate(tensor):
                yield f"state {number} {layer}", rows
        return
    mark = next(mark for mark in _SOURCES if hasattr(pool, mark))
    for name, layers in _SOURCES[mark](pool).items():
        for layer, rows in enumerate(layers):
            yield f"{name} {layer}", rows


_SOURCES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "index_k_with_scale_buffer": lambda pool: {
        "index": pool.device_pool.index_k_with_scale_buffer
    },
    "device_page_views": lambda pool: {"state": pool.device_page_views},
    "device_buffers": lambda pool: {"row": pool.device_buffers},
    "device_rows": lambda pool: {"row": pool.device_rows},
    "device_k_buffers": lambda pool: {
        "k": pool.device_k_buffers,
        "v": pool.device_v_buffers,
    },
    "device_kv_buffers": lambda pool: {"kv": pool.device_kv_buffers},
    "device_pool": lambda pool: {"k": pool.device_pool.k_buffer},
}
"""What a host pool has, to where its rows come from; the first one counts."""


def _mark(label: str, rows: torch.Tensor) -> None:
    """Give each row bytes of its own."""
    if not rows.numel():
        return
    flat = rows.view(torch.uint8).reshape(rows.shape[0], -1)
    for number in range(min(len(flat), 2 * zoo.PAGE * 8)):
        text = hashlib.shake_256(f"{label} {number}".encode()).digest(flat.shape[1])
        flat[number] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def stand_in_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy as SGLang's kernels do, by the strides that its pools pass them.

    Without an accelerator SGLang binds none of these names.
    """
    for name, copy in _COPIES.items():
        monkeypatch.setattr(builtins, name, copy, raising=False)


def _rows(src_layers: Any, dst: Any, given: SimpleNamespace) -> None:
    pairs = zip(given.src_indices.tolist(), given.dst_indices.tolist(), strict=True)
    for source, target in pairs:
        for layer, base in enumerate(src_layers.tolist()):
            at = target * given.dst_layout_dim + layer * given.item_size
            ctypes.memmove(
                dst.data_ptr() + at, base + source * given.item_size, given.item_size
            )


def _page_first(*, src_k_layers: Any, dst_k: Any, **given: Any) -> None:
    rest = SimpleNamespace(**given)
    _rows(src_k_layers, dst_k, rest)
    _rows(rest.src_v_layers, rest.dst_v, rest)


def _latent_page_first(*, src_layers: Any, dst: Any, **given: Any) -> None:
    _rows(src_layers, dst, SimpleNamespace(**given))


def _states_page_first(*, src_ptrs: Any, dst: Any, **given: Any) -> None:
    _rows(src_ptrs, dst, SimpleNamespace(**given))


def _page_head(*, src_k_layers: Any, dst_k: Any, **given: Any) -> None:
    """Heads first, then tokens, then layers: the axes of the host's tensor."""
    rest = SimpleNamespace(**given)
    for layers, dst in ((src_k_layers, dst_k), (rest.src_v_layers, rest.dst_v)):
        width = rest.item_size // rest.head_num
        pairs = zip(rest.src_indices.tolist(), rest.dst_indices.tolist(), strict=True)
        for source, target in pairs:
            page, token = divmod(target, rest.page_size)
            for head in range(rest.head_num):
                for layer, base in enumerate(layers.tolist()):
                    row = (page * rest.head_num + head) * rest.page_size + token
                    at = (row * rest.num_layers + layer) * width
                    ctypes.memmove(
                        dst.data_ptr() + at,
                        base + source * rest.item_size + head * width,
                        width,
                    )


_COPIES: dict[str, Callable[..., None]] = {
    "transfer_kv_all_layer_lf_pf": _page_first,
    "transfer_kv_all_layer_mla_lf_pf": _latent_page_first,
    "transfer_kv_all_layer_lf_ph": _page_head,
    "transfer_kv_mamba_lf_pf": _states_page_first,
}
