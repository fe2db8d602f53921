"""Tiny models with random weights, and the engine's arguments for each.

Written as real checkpoints with a fixed seed, so that an engine that is started
again has the very same weights. Their groups are what is tested, not what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 512
IMAGE_TOKEN = 260
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
    """One family of models.

    Args:
        name: The family.
        config: Builds the configuration of transformers.
        pools: The pools that it must load from.
        engine: Arguments of vLLM's engine that differ from the common ones.
        prompt_tokens: Length of the first prompt.
        seed: Of the weights.
        embedding_scale: Spread of the embedding's random weights.
        draft: The family whose model proposes tokens.
        method: How it does.
        noise: Added to each weight, as a part of its spread: a model that often
            agrees with the one of the same seed, and not always.
        head: Whether it is a head for EAGLE, over the states of another model.
    """

    name: str
    config: Callable[[], Any]
    pools: tuple[str, ...] = ("kv",)
    engine: dict[str, Any] = attrs.field(factory=dict)
    prompt_tokens: int = 100
    seed: int = 1234
    embedding_scale: float = 0.3
    draft: str = ""
    method: str = "draft_model"
    noise: float = 0.0
    head: bool = False


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=2, **_SMALL)


def _one_layer() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=1, **_SMALL)


def _divisible(config: Callable[[], Any], heads: int) -> Callable[[], Any]:
    """Return a model whose heads several ranks can divide."""

    def build() -> Any:
        made = config()
        made.num_attention_heads, made.num_key_value_heads = 2 * heads, heads
        return made

    return build


def _window() -> Any:
    from transformers import MistralConfig

    return MistralConfig(num_hidden_layers=2, sliding_window=32, **_SMALL)


def _window_and_full() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        num_hidden_layers=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        **{**_SMALL, "tie_word_embeddings": True},
    )


def _latent() -> Any:
    """Latent attention with the widths that the kernel for AMX takes."""
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
    config.topk_method = "noaux_tc"
    config.scoring_func = "sigmoid"
    config.moe_layer_freq = 1
    return config


def _mamba2() -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(
        num_hidden_layers=2,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=16,
        **_SMALL,
    )


def _gated_delta_net() -> Any:
    """Gated DeltaNet with the head widths that the kernel takes."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **{**_SMALL, "hidden_size": 128, "head_dim": 64},
    )


def _several_states() -> Any:
    """Three layers with states to one with attention, as they are published."""
    config = _gated_delta_net()
    config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    return config


def _chunked() -> Any:
    """Layers that see the tokens of their own chunk alone, beside one that sees all."""
    config = _tuned_temperature()
    config.attention_chunk_size = 64
    config.no_rope_layers = [1, 0]
    return config


def _long_rope() -> Any:
    """Rotary factors that are chosen by the length that an engine is started with."""
    from transformers import Phi3Config

    half = 16
    scaling = {
        "type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + n for n in range(half)],
    }
    lengths = {"original_max_position_embeddings": 512, "rope_scaling": scaling}
    return Phi3Config(num_hidden_layers=2, **{**_SMALL, **lengths})


def _tuned_temperature() -> Any:
    """Layers without positions, whose attention is scaled by the engine's length."""
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(
        num_hidden_layers=2,
        interleave_moe_layer_step=5,
        intermediate_size_mlp=128,
        num_local_experts=2,
        attention_chunk_size=4096,
        no_rope_layers=[0, 0],
        floor_scale=8,
        attn_scale=0.5,
        **{**_SMALL, "max_position_embeddings": 65536},
    )
    config.architectures = ["Llama4ForCausalLM"]
    return config


def _window_past_a_chunk() -> Any:
    """A window that vLLM takes to be one longer than a multiple of the block."""
    from transformers import Cohere2Config

    return Cohere2Config(
        num_hidden_layers=4,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **{**_SMALL, "tie_word_embeddings": True},
    )


def _with_images() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    return LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            projection_dim=64,
        ),
        text_config=LlamaConfig(num_hidden_layers=2, **_SMALL),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=16,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )


def _middling() -> Any:
    """A model whose prefill takes a moment."""
    from transformers import LlamaConfig

    wide = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    return LlamaConfig(num_hidden_layers=8, **{**_SMALL, **wide})


MIDDLING = Tiny(name="middling", config=_middling)
"""For benchmarks: not among the families."""

_HALF: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 1}
"""What needs bf16: there a batch of two answers otherwise than one alone."""

FAMILIES = {
    tiny.name: tiny
    for tiny in (
        Tiny(name="llama", config=_llama),
        Tiny(name="draft", config=_llama, draft="llama_draft"),
        Tiny(name="llama_draft", config=_llama, noise=0.15),
        Tiny(
            name="eagle",
            config=_llama,
            draft="llama_eagle",
            method="eagle",
            embedding_scale=2.0,
        ),
        Tiny(name="llama_eagle", config=_one_layer, head=True),
        Tiny(name="llama_other", config=_llama, seed=99),
        Tiny(name="llama_2", config=_divisible(_llama, 2)),
        Tiny(name="swa", config=_window, pools=("swa",), prompt_tokens=200),
        Tiny(
            name="swa_full",
            config=_window_and_full,
            pools=("kv", "swa"),
            prompt_tokens=200,
            embedding_scale=0.02,
        ),
        Tiny(
            name="swa_full_2",
            config=_divisible(_window_and_full, 2),
            pools=("kv", "swa"),
            prompt_tokens=200,
            embedding_scale=0.02,
        ),
        Tiny(name="long_rope", config=_long_rope),
        Tiny(name="tuned", config=_tuned_temperature),
        Tiny(name="chunked", config=_chunked, pools=("kv", "swa"), prompt_tokens=200),
        Tiny(
            name="window_past",
            config=_window_past_a_chunk,
            pools=("kv", "swa"),
            prompt_tokens=200,
            embedding_scale=0.02,
        ),
        Tiny(name="images", config=_with_images),
        Tiny(name="mla", config=_latent, engine=_HALF),
        Tiny(name="mamba2", config=_mamba2, pools=("kv", "mamba"), prompt_tokens=200),
        Tiny(
            name="gdn",
            config=_gated_delta_net,
            pools=("kv", "mamba"),
            prompt_tokens=700,
            engine=_HALF,
        ),
        Tiny(
            name="gdn_groups",
            config=_several_states,
            pools=("kv", "mamba", "mamba_1", "mamba_2"),
            prompt_tokens=700,
            engine=_HALF,
        ),
    )
}


def make(tiny: Tiny, folder: Path) -> Path:
    """Write the checkpoint of a family, unless it is there; return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    out = folder / tiny.name
    if out.exists():
        return out
    torch.manual_seed(tiny.seed)
    config = tiny.config()
    auto: Any = AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    other = torch.Generator().manual_seed(tiny.seed + 1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                continue
            # With the usual 0.02 the logits of a tiny model are all alike.
            scale = 0.3 if "lm_head" in name else 0.15
            scale = tiny.embedding_scale if "embed" in name else scale
            weights.normal_(0, scale)
            more = torch.randn(weights.shape, generator=other)
            weights.add_(more, alpha=tiny.noise * scale)
    model.save_pretrained(out)
    if tiny.head:
        _name_as_head(out / "model.safetensors")
    fast = _write_tokenizer(out)
    if hasattr(config, "vision_config"):
        _write_processor(out, fast)
        _name_vision_as_published(out / "model.safetensors")
    return out


def _name_as_head(file: Path) -> None:
    """Name the tensors of a layer as a head for EAGLE, which adds a projection.

    It passes on the token, which says most about the next one where embeddings are
    large, and adds a little of the states of the other model and of its own attention.
    """
    import torch
    from safetensors.torch import load_file, save_file

    given = load_file(file)
    named = {
        name.removeprefix("model."): one.clone()
        for name, one in given.items()
        if ".layers." in name and "input_layernorm" not in name
    }
    named["layers.0.self_attn.o_proj.weight"] *= 0.3
    named["layers.0.mlp.down_proj.weight"] *= 0.1
    one = torch.eye(named["layers.0.self_attn.q_proj.weight"].shape[1])
    named["fc.weight"] = torch.cat((one, 0.1 * one), dim=1)
    save_file(named, file, metadata={"format": "pt"})


def _name_vision_as_published(file: Path) -> None:
    """Name the tensors of a vision tower as checkpoints of older releases do."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = load_file(file)
    named = {
        name if new in name else name.replace(old, new): one.clone()
        for name, one in tensors.items()
    }
    save_file(named, file, metadata={"format": "pt"})


def make_adapter(base: Path, out: Path, seed: int = 0) -> Path:
    """Write a LoRA adapter of a model's attention; return its folder."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    auto: Any = AutoConfig
    config = auto.from_pretrained(base)
    wide = config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, width in (("q_proj", wide), ("v_proj", narrow)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            shape_a, shape_b = (8, config.hidden_size), (width, 8)
            tensors[f"{at}_A.weight"] = torch.randn(shape_a, generator=random)
            tensors[f"{at}_B.weight"] = torch.randn(shape_b, generator=random)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    given = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (out / "adapter_config.json").write_text(json.dumps(given))
    return out


def _write_processor(folder: Path, tokenizer: Any) -> None:
    from transformers import CLIPImageProcessor, LlavaProcessor

    side = {"height": 32, "width": 32}
    image: Any = CLIPImageProcessor
    both: Any = LlavaProcessor
    both(
        image_processor=image(size={"shortest_edge": 32}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    made = fast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    made.save_pretrained(folder)
    return made
