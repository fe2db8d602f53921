"""Stand-in for the CPU build of `sgl_kernel`, which no package index carries.

Just enough, in plain torch, for SGLang 0.5.23 with `--device cpu` and
`--attention-backend torch_native`: its scheduler, radix tree, cache controller
and host pools then run as they are. What is replaced here is no evidence about
SGLang's own kernels. A name that is not here can be imported, and raises when
it is called.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, NoReturn

# An engine is three processes, and each spends seconds on imports. A quarter
# of that goes to looking for garbage among modules, where there is none.
gc.set_threshold(100_000, 50, 50)

from sgl_kernel import copies, patches  # noqa: E402 - imports torch
from sgl_kernel.speculation import (  # noqa: E402 - imports torch
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
__version__ = "0.0.0+kvdock.standin"

copies.install()
patches.install()


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots into its row of the table."""
    del pool_len
    taken = 0
    rows = zip(
        req_pool_indices.tolist(),
        start_offset.tolist(),
        end_offset.tolist(),
        strict=True,
    )
    for row, start, stop in rows:
        slots = out_cache_loc[taken : taken + stop - start]
        req_to_token[row, start:stop] = slots.to(req_to_token.dtype)
        taken += stop - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a kernel that is not replaced: importable, not callable."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"the stand-in has no kernel {name!r}")

    return missing
