"""Copies between the host pool and the "device" pool, both in host memory.

SGLang binds these names on accelerators only, so on a CPU its pool modules
look them up as built-ins. Pinning memory means nothing here and is left out.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int | None = None,
) -> None:
    """Copy token rows of each layer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load one layer from pages into token rows."""
    pages = (src_indices[::page_size] // page_size).long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = source[pages, layer_id].reshape(len(dst_indices), *target.shape[1:])
        target[dst_indices.long()] = rows


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Back up all layers from token rows into pages."""
    pages = (dst_indices[::page_size] // page_size).long()
    layers = len(src_ptrs) // len(dst_ptrs)
    for part, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[part * layers + layer][src_indices.long()]
            target[pages, layer] = rows.reshape(len(pages), *target.shape[2:])


class _NoPinning:
    """The pinning calls of the CUDA runtime, all of them successful."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Pin nothing."""
        del address, nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Unpin nothing."""
        del address
        return 0


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


def install() -> None:
    """Put the copies where SGLang looks for them."""
    for copy in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(builtins, copy.__name__, copy)
    if torch.cuda.is_available():
        return
    torch.cuda.cudart = _NoPinning
    for name in (
        "tensor",
        "empty",
        "zeros",
        "ones",
        "full",
        "empty_like",
        "zeros_like",
    ):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign] # a no-op is the point
