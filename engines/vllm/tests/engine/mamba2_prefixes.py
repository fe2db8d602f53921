"""Prefix caching of Mamba2 layers on a CPU.

vLLM 0.32.0 asks the kernel for states inside a chunk, which the one for CPUs does
not return (IndexError in `MambaMixer2.conv_ssm_forward`). Without such checkpoints
the scheduler splits a prompt at block boundaries instead.
"""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Give Mamba2 layers the specification of their base class, in this process."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    bases = MambaMixer2.__mro__[1:]

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        owner = next(one for one in bases if "get_kv_cache_spec" in one.__dict__)
        return owner.__dict__["get_kv_cache_spec"](self, vllm_config)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
