"""Tiny models with random weights, and the engine's arguments for each.

Written as real checkpoints with a fixed seed, so that an engine that is
started again has the very same weights. Their pools are what is tested, not
what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_SMALL: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@attrs.frozen(kw_only=True)
class Tiny:
    """One tiny model.

    Args:
        name: The family, as a folder.
        config: Builds the configuration of transformers.
        engine: Arguments of SGLang's engine that differ from the common ones.
        environ: Variables that the stand-in reads.
        turns: Prompts are asked again longer, as the next turn of a talk:
            states are kept at the end of a prompt only.
        embedding_scale: Spread of the embedding's random weights.
    """

    name: str
    config: Callable[[], Any]
    engine: dict[str, Any] = attrs.field(factory=dict)
    environ: dict[str, str] = attrs.field(factory=dict)
    turns: bool = False
    embedding_scale: float = 0.3


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=2, **_SMALL)


def _latent() -> Any:
    """Latent attention as SGLang takes it on a CPU: yarn, and all layers dense."""
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        **_COMMON,
    )
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
    config.moe_layer_freq = 1
    return config


def _window() -> Any:
    """Layers that look back 32 tokens beside layers that see all.

    SGLang ties Gemma's output to its embedding whatever the file says.
    """
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        num_hidden_layers=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        **{**_SMALL, "tie_word_embeddings": True},
    )
    config.is_hybrid_swa = True
    config.hybrid_layer_pattern = [1, 0, 1, 0]
    return config


def _recurrent() -> Any:
    """Gated-delta layers beside attention layers."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **_SMALL,
    )
    config.full_attention_interval = 2
    return config


MODELS = {
    one.name: one
    for one in (
        Tiny(name="llama", config=_llama),
        Tiny(name="latent", config=_latent),
        Tiny(
            name="window",
            config=_window,
            environ={"TESTS_OF_KVDOCK_GEMMA_WINDOW": "1"},
            embedding_scale=0.02,
        ),
        Tiny(
            name="recurrent",
            config=_recurrent,
            engine={
                "page_size": 1,
                "mamba_radix_cache_strategy": "no_buffer",
                # Without it, half of the machine becomes states.
                "max_mamba_cache_size": 64,
            },
            turns=True,
        ),
    )
}


def _middling() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=8,
        **{
            **_SMALL,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    )


MIDDLING = Tiny(name="middling", config=_middling, engine={"max_total_tokens": 16384})
"""Large enough that computing a prompt costs something, for benchmarks."""


def make(name: str, root: Path) -> Path:
    """Write a model's checkpoint, or leave the one that is there."""
    folder = root / name
    if not (folder / "config.json").exists():
        write(MODELS[name], folder)
    return folder


def write(tiny: Tiny, folder: Path, seed: int = 1234) -> Path:
    """Write a checkpoint with random weights, always the same for a seed."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM  # its methods have no types
    model = auto.from_config(tiny.config(), dtype=torch.float32)
    # The usual spread of 0.02 gives a tiny model almost equal logits: any
    # prefix would be followed by the same tokens.
    with torch.no_grad():
        for weight, values in model.named_parameters():
            if values.dim() < 2:
                continue
            ends = "embed" in weight or "lm_head" in weight
            values.normal_(0, tiny.embedding_scale if ends else 0.15)
    model.save_pretrained(folder)
    return folder
