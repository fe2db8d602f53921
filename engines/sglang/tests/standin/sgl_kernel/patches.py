"""What SGLang 0.5.23 lacks or does wrong on a CPU, mended as modules load.

SGLang starts processes of its own, and each imports `sgl_kernel` early. So a
finder that runs a function right after a module was executed reaches them all,
and no installed file is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvdock_trace
from sgl_kernel import speculation

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

GEMMA_WINDOW = "TESTS_OF_KVDOCK_GEMMA_WINDOW"
"""Set it to give Gemma 3 a sliding-window pool, which SGLang pins off."""


SPEED = "TESTS_OF_KVDOCK_SPEED"
"""Set it to a file, and a throttled store has the bytes per second that it says."""


_GEMMA = "sglang.srt.arg_groups.model_overrides.gemma2_gemma3"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function on a module as soon as it is loaded, once."""

    def __init__(self, mends: dict[str, Callable[[Any], None]]) -> None:
        self.mends = mends

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Wrap the loader of a module that is to be mended."""
        del path, target
        mend = self.mends.pop(name, None)
        if mend is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            mend(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # the hook itself
        return spec


def _latent_attention(module: Any) -> None:
    """Choose latent attention: the default would read the pool as 192 wide."""
    module.AttentionBackendRegistry.register(
        "torch_native", lambda *_: module.AttnForwardMethod.MLA
    )


def _window_slots(module: Any) -> None:
    """Read window layers at the slots at which they were written."""
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, _translated(getattr(backend, name)))
    speculation.verifying(backend)


def _translated(run: Callable[..., Any]) -> Callable[..., Any]:
    def ran(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        window = options.get("sliding_window_size")
        if self.use_sliding_window_kv_pool and window is not None and window > -1:
            pool = self.token_to_kv_pool
            flat = req_to_token.reshape(-1).long()
            slots = pool.translate_loc_from_full_to_swa(flat)
            req_to_token = slots.reshape(req_to_token.shape).clamp(min=0)
        return run(
            self, query, output, k_cache, v_cache, req_to_token, *args, **options
        )

    return ran


def _gated_norm(module: Any) -> None:
    """Give gated-delta layers their norm, which is a Triton kernel."""

    def rms_norm_gated(  # noqa: PLR0913, PLR0917 - the kernel's own signature
        x: torch.Tensor,
        g: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation: str = "swish",
        residual: object = None,
        prenorm: bool = False,  # noqa: FBT001, FBT002 - the kernel's own signature
        residual_in_fp32: bool = False,  # noqa: FBT001, FBT002 - same
        eps: float = 1e-6,
        **_: object,
    ) -> torch.Tensor:
        del residual_in_fp32
        if residual is not None or prenorm:
            raise NotImplementedError("the stand-in norms without a residual")
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight.float()
        y = y if bias is None else y + bias.float()
        gate = g.float().sigmoid()
        y = y * (gate if activation == "sigmoid" else g.float() * gate)
        return y.to(x.dtype)

    module.rms_norm_gated = rms_norm_gated


def _shared_expert(module: Any) -> None:
    """Add the gated output of a shared expert, which is a Triton kernel."""
    if not hasattr(module, "fused_gate_sigmoid_mul_add"):
        return

    def fused_gate_sigmoid_mul_add(
        hidden_states: torch.Tensor,
        gate_weight: torch.Tensor,
        shared_output: torch.Tensor,
        final_hidden_states: torch.Tensor,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        weight = gate_weight.float().reshape(-1, hidden_states.shape[-1])
        gate = (hidden_states.float() @ weight.T).sigmoid()
        share = (gate * shared_output.float()).to(final_hidden_states.dtype)
        return final_hidden_states.add_(share)

    module.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def _gemma_window(module: Any) -> None:
    """Take back the override that gives Gemma 3 full-length pools only."""
    if not os.environ.get(GEMMA_WINDOW):
        return
    from sglang.srt.arg_groups import model_override_base

    overrides = model_override_base._MODEL_OVERRIDE_FNS
    model = "Gemma3ForCausalLM"
    overrides[model] = [
        one for one in overrides.get(model, []) if one.__module__ != module.__name__
    ]


def _speed_of_a_file(module: Any) -> None:
    """Change a throttle while the engine runs, in whatever process it is."""
    path, injector = Path(os.environ[SPEED]), module.FaultInjector
    throttle = injector._throttle

    def changed(self: Any, nbytes: int) -> None:
        self.inject(bandwidth=int(path.read_text()))
        throttle(self, nbytes)

    injector._throttle = changed


def install() -> None:
    """Mend SGLang's modules as they are loaded."""
    models = "sglang.srt.models.deepseek_common"
    mends: dict[str, Callable[[Any], None]] = {
        f"{models}.attention_backend_handler": _latent_attention,
        "sglang.srt.layers.attention.torch_native_backend": _window_slots,
        "sglang.srt.speculative.draft_utils": speculation.draft_backend,
        "sglang.kernels.ops.attention.fla.fused_norm_gate": _gated_norm,
        "sglang.kernels.ops.elementwise.elementwise": _shared_expert,
        "kvdock_sglang.attachments": kvdock_trace.traced,
        _GEMMA: _gemma_window,
    }
    if os.environ.get(SPEED):
        mends["kvdock.wrappers.faults"] = _speed_of_a_file
    sys.meta_path.insert(0, _AfterImport(mends))


def mend_again() -> None:
    """Do what variables ask for in a process that was forked after its imports."""
    if _GEMMA in sys.modules:
        _gemma_window(sys.modules[_GEMMA])
