"""Drafts on a CPU: chains of one proposal a step, in plain torch.

SGLang's own CPU kernels do the same for its AMX backend. A tree with branches is not
replaced: it raises.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Move cache slots of every layer."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [
            ctypes.string_at(base + at * stride, stride) for at in src_loc.tolist()
        ]
        for at, slot in zip(tgt_loc.tolist(), slots, strict=True):
            ctypes.memmove(base + at * stride, slot, stride)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Find the slots that a draft writes to, behind each sequence."""
    del pool_len
    wide = topk * steps
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    for at, (row, start) in enumerate(rows):
        slots = req_to_token[row, start : start + wide]
        out_cache_loc[at * wide : (at + 1) * wide] = slots.to(out_cache_loc.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Find the slots between two offsets of each sequence."""
    del pool_len
    taken = 0
    for row, start, stop in zip(
        req_pool_indices.tolist(),
        start_offset.tolist(),
        end_offset.tolist(),
        strict=True,
    ):
        slots = req_to_token[row, start:stop]
        out_cache_loc[taken : taken + stop - start] = slots.to(out_cache_loc.dtype)
        taken += stop - start


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Gather the slots of accepted tokens."""
    chosen = accept_index.reshape(-1)
    chosen = chosen[chosen != -1].long()
    accepted[: len(chosen)] = out_cache_loc[chosen]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus: torch.Tensor,
    stride: int,
) -> None:
    """Take the last accepted token of each sequence."""
    tokens = accept_tokens.reshape(-1)
    for at, length in enumerate(accept_lens.tolist()):
        bonus[at] = tokens[at * stride + length - 1]


def build_tree_kernel_efficient_cpu(  # noqa: PLR0913, PLR0917 - the kernel's own signature
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mode: Any,
) -> None:
    """Describe a chain of proposals for each sequence."""
    del parent_list, top_scores_index, steps
    if topk != 1:
        raise NotImplementedError("the stand-in drafts chains")
    count, ahead = seq_lens.numel(), torch.arange(tokens)
    chain = torch.tril(torch.ones(tokens, tokens, dtype=tree_mask.dtype))
    after = ahead + 1
    after[-1] = -1
    place = 0
    for at, length in enumerate(seq_lens.tolist()):
        positions[at * tokens : (at + 1) * tokens] = length + ahead
        retrieve_index.view(count, tokens)[at] = at * tokens + ahead
        retrieve_next_token.view(count, tokens)[at] = after
        retrieve_next_sibling.view(count, tokens)[at] = -1
        seen = chain
        if int(mode) == 0:
            before = torch.ones(tokens, length, dtype=tree_mask.dtype)
            seen = torch.cat([before, chain], dim=1)
        tree_mask.view(-1)[place : place + seen.numel()] = seen.reshape(-1)
        place += seen.numel()


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept proposals for as long as the target would have chosen them.

    Names of arguments are spelled as SGLang gives them.
    """
    del retrive_index, retrive_next_token, retrive_next_sibling
    count, tokens = candidates.shape
    wanted = target_predict.reshape(count, tokens)
    for at in range(count):
        last = 0
        accept_index[at, 0] = at * tokens
        while last + 1 < min(tokens, accept_index.shape[1]) and int(
            candidates[at, last + 1]
        ) == int(wanted[at, last]):
            predicts[at * tokens + last] = wanted[at, last]
            last += 1
            accept_index[at, last] = at * tokens + last
        accept_token_num[at] = last
        predicts[at * tokens + last] = wanted[at, last]


def draft_backend(module: Any) -> None:
    """Let a draft attend as the target does, one proposal a step."""

    def create_draft_extend_backend(self: Any) -> Any:
        from sglang.srt.layers.attention import torch_native_backend

        backend: Any = torch_native_backend.TorchNativeAttnBackend(
            self.draft_model_runner
        )
        backend.prefill_attention_backend_str = "torch_native"
        backend.decode_attention_backend_str = "torch_native"
        return backend

    module.DraftBackendFactory.create_draft_extend_backend = create_draft_extend_backend


def verifying(backend: Any) -> None:
    """Give the native backend what a verification lacks: how long prefixes are."""
    forward = backend.forward_extend

    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if not batch.forward_mode.is_target_verify():
            return forward(self, q, k, v, layer, batch, *args, **more)
        kept = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
        tokens = batch.spec_info.draft_token_num
        batch.extend_prefix_lens = batch.seq_lens
        batch.extend_seq_lens = torch.full_like(batch.seq_lens, tokens)
        batch.seq_lens = batch.seq_lens + tokens
        try:
            return forward(self, q, k, v, layer, batch, *args, **more)
        finally:
            batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = kept

    backend.forward_extend = forward_extend
