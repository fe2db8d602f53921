"""Gated-delta and short-convolution kernels in plain torch, for tiny models.

States are [slot, value head, key width, value width]; one token at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit


def _activated(y: torch.Tensor, activation: object) -> torch.Tensor:
    return F.silu(y) if activation in ("silu", "swish", True) else y


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: object = None,
    conv_states: Any = None,
    has_initial_state: Any = None,
    cache_indices: Any = None,
    query_start_loc: Any = None,
    **_: object,
) -> torch.Tensor:
    """Convolve whole prompts and keep the last inputs as their states."""
    out = torch.empty_like(x)
    taps = weight.shape[-1]
    bounds = query_start_loc.tolist()
    for n, slot in enumerate(cache_indices.tolist()):
        mine = x[:, bounds[n] : bounds[n + 1]]
        if mine.shape[1] == 0:
            continue
        before = conv_states[slot]
        if not bool(has_initial_state[n]):
            before = torch.zeros_like(before)
        full = torch.cat([before.to(x.dtype), mine], 1)
        conv_states[slot] = full[:, -(taps - 1) :].to(conv_states.dtype)
        y = F.conv1d(
            full[None].float(),
            weight[:, None].float(),
            None if bias is None else bias.float(),
            groups=x.shape[0],
        )[0]
        out[:, bounds[n] : bounds[n + 1]] = _activated(y, activation).to(x.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: object = None,
    conv_state_indices: Any = None,
    **_: object,
) -> torch.Tensor:
    """Convolve one new token of each request."""
    slots = conv_state_indices.long()
    full = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], -1)
    conv_states[slots] = full[..., 1:].to(conv_states.dtype)
    y = (full.float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    return _activated(y, activation).to(x.dtype)


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    normed: bool,  # noqa: FBT001 - one more term
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (term.float() for term in (q, k, v, g, beta))
    repeats = v.shape[1] // q.shape[1]
    if normed:
        q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
    q = q.repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5
    k = k.repeat_interleave(repeats, 1)
    out = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        known = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum(
            "hk,hv->hkv", k[t], (v[t] - known) * beta[t][:, None]
        )
        out.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(out), state


def chunk_gated_delta_rule_cpu(  # noqa: PLR0913, PLR0917 - the kernel's own signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    head_first: bool = False,  # noqa: FBT001, FBT002 - the kernel's own signature
    use_qk_l2norm_in_kernel: bool = True,  # noqa: FBT001, FBT002 - same
    initial_state_indices: Any = None,
    **_: object,
) -> tuple[torch.Tensor, None, None]:
    """Run whole prompts and leave their states in the pool."""
    del head_first
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for n, slot in enumerate(initial_state_indices.tolist()):
        mine = slice(bounds[n], bounds[n + 1])
        if bounds[n + 1] == bounds[n]:
            continue
        y, state = _delta_rule(
            q[0, mine],
            k[0, mine],
            v[0, mine],
            g.reshape(-1, g.shape[-1])[mine],
            beta.reshape(-1, beta.shape[-1])[mine],
            initial_state[slot].float(),
            use_qk_l2norm_in_kernel,
        )
        out[0, mine] = y.to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def _gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _decode(  # noqa: PLR0913, PLR0917 - the operator's own signature
    A_log: torch.Tensor,  # noqa: N803 - the operator's own name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,  # noqa: FBT001 - the operator's own signature
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> torch.Tensor:
    del cu_seqlens, softplus_beta, softplus_threshold
    states = initial_state_source
    g, beta = _gates(
        A_log, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias
    )
    out = torch.empty_like(v)
    for n, slot in enumerate(initial_state_indices.tolist()):
        one = slice(n, n + 1)
        y, state = _delta_rule(
            q[0, one],
            k[0, one],
            v[0, one],
            g[0, one],
            beta[0, one],
            states[slot].float(),
            use_qk_l2norm_in_kernel,
        )
        out[0, one] = y.to(v.dtype)
        states[slot] = state.to(states.dtype)
    return out


_make: Any = torch.library.Library
_LIBRARY = _make("sgl_kernel", "FRAGMENT")
_LIBRARY.define(
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.impl("fused_gdn_gating_cpu", _gates, "CompositeExplicitAutograd")
_LIBRARY.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias,"
    " Tensor q, Tensor k, Tensor v, Tensor a, Tensor b,"
    " Tensor(a!) initial_state_source, Tensor initial_state_indices,"
    " Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta=1.0,"
    " float softplus_threshold=20.0) -> Tensor"
)
_LIBRARY.impl(
    "fused_sigmoid_gating_delta_rule_update_cpu",
    _decode,
    "CompositeExplicitAutograd",
)
