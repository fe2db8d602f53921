"""Tiny causal models made on the spot: random weights, a fixed seed.

Nothing is downloaded and no tokenizer is needed, because a trial works on
token ids. Every process of a trial loads the same weights from disk.

The usual initialisation (a small standard deviation everywhere) makes a
random model nearly blind to its context: the next token follows from the last
one, attention averages thousands of values to nothing, and altered pages
would change no token. The weights here are scaled so that attention picks few
positions and each layer changes the residual stream noticeably.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from model_demo.families import Family, Scale

SEED = 20240611
VOCAB_TOKENS = 2048
_FIRST_PLAIN_TOKEN = 4

_ATTENTION_LOGIT_STD = 3.0
"""Standard deviation of attention scores: of 4096 positions, a few count."""

_LATE_LAYER_GAIN = 0.25
"""How much the layers that the draft lacks add; sets the draft's acceptance."""


_STATE_DECAY = (0.003, 0.3)
"""Slowest and fastest decay of recurrent states, per unit of time step."""


class Models(NamedTuple):
    """A target and, where the family has one, its draft."""

    target: PreTrainedModel
    draft: PreTrainedModel | None


class _Size(NamedTuple):
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


_SIZES = {
    (Family.MHA, Scale.DEMO): _Size(512, 1408, 7, 8, 2, 64),
    (Family.MLA, Scale.DEMO): _Size(384, 1024, 5, 6, 6, 64),
    (Family.SWA, Scale.DEMO): _Size(512, 1408, 8, 8, 2, 64),
    (Family.MAMBA, Scale.DEMO): _Size(384, 1024, 5, 6, 2, 64),
    (Family.MHA, Scale.TINY): _Size(64, 128, 4, 4, 2, 16),
    (Family.MLA, Scale.TINY): _Size(64, 128, 2, 4, 4, 16),
    (Family.SWA, Scale.TINY): _Size(64, 128, 4, 4, 2, 16),
    (Family.MAMBA, Scale.TINY): _Size(64, 128, 2, 4, 2, 16),
}
_DRAFT_LAYERS = {Scale.DEMO: 2, Scale.TINY: 1}
_WINDOW_TOKENS = {Scale.DEMO: 512, Scale.TINY: 48}


def prompt_token_ids(family: Family, tokens: int) -> list[int]:
    """Make a prompt: the same ids for the same family and length."""
    generator = torch.Generator().manual_seed(SEED + len(family) + ord(family[1]))
    ids = torch.randint(
        _FIRST_PLAIN_TOKEN, VOCAB_TOKENS, (tokens,), generator=generator
    )
    return [int(token) for token in ids]


def build(family: Family, scale: Scale) -> Models:
    """Make the models of a family, with random weights."""
    target = _random_model(_config(family, scale), seed=SEED)
    if family is not Family.MHA:
        return Models(target, None)
    return Models(target, _draft_of(target, _DRAFT_LAYERS[scale]))


def save(models: Models, directory: Path) -> None:
    """Write the models below a directory, which is made if needed."""
    models.target.save_pretrained(directory / "target")
    if models.draft is not None:
        models.draft.save_pretrained(directory / "draft")


def load(directory: Path) -> Models:
    """Read what `save` wrote."""
    draft = directory / "draft"
    return Models(_load(directory / "target"), _load(draft) if draft.is_dir() else None)


def _load(directory: Path) -> PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    )
    return _ready(model)


def _new(config: PretrainedConfig) -> Any:
    made = transformers.AutoModelForCausalLM.from_config  # its signature is untyped
    return made(config, dtype=torch.float32)  # type: ignore[no-untyped-call]


def _ready(model: Any) -> PreTrainedModel:
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _config(family: Family, scale: Scale) -> PretrainedConfig:
    size = _SIZES[family, scale]
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    match family:
        case Family.MHA:
            return transformers.LlamaConfig(**shared)
        case Family.MLA:
            del shared["head_dim"]
            return transformers.DeepseekV3Config(
                **shared,
                # All layers dense: expert choice is a step function, and a
                # rounding difference that flips one would hide real errors.
                first_k_dense_replace=size.layers,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=size.inner // 4,
                kv_lora_rank=2 * size.head_dim,
                q_lora_rank=3 * size.head_dim,
                qk_nope_head_dim=size.head_dim,
                qk_rope_head_dim=size.head_dim // 2,
                v_head_dim=size.head_dim,
            )
        case Family.SWA:
            every = 4 if size.layers % 4 == 0 and scale is Scale.DEMO else 2
            return transformers.Gemma3TextConfig(
                **shared,
                sliding_window=_WINDOW_TOKENS[scale],
                layer_types=[
                    "full_attention"
                    if (layer + 1) % every == 0
                    else "sliding_attention"
                    for layer in range(size.layers)
                ],
                # Queries and keys are normalised, so only this scale can
                # sharpen the attention.
                query_pre_attn_scalar=round(size.head_dim / _ATTENTION_LOGIT_STD**2),
            )
        case Family.MAMBA:
            return transformers.FalconH1Config(
                **shared,
                mamba_d_ssm=2 * size.hidden,
                mamba_n_heads=2 * size.hidden // size.head_dim,
                mamba_d_head=size.head_dim,
                mamba_n_groups=1,
                mamba_d_state=size.head_dim,
                mamba_d_conv=4,
                # Long-lived states (see _random_model) grow large; the norm
                # keeps them from drowning the rest of the layer.
                mamba_rms_norm=True,
                mamba_chunk_size=128 if scale is Scale.DEMO else 16,
            )


def _random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = _new(config)
    query_key_gain = math.sqrt(_ATTENTION_LOGIT_STD)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                # The default forgets a token within a few steps, so a
                # restored state would hardly matter; this lasts for hundreds.
                weight.copy_(torch.linspace(*_STATE_DECAY, len(weight)).log())
            if weight.dim() != 2:  # noqa: PLR2004 - only matrices mix inputs
                continue
            if "embed" in name:
                # Gemma multiplies its embeddings by sqrt(hidden) itself.
                weight.normal_(
                    0,
                    weight.shape[1] ** -0.5
                    if config.model_type == "gemma3_text"
                    else 1.0,
                )
                continue
            sharpen = name.endswith(
                ("q_proj.weight", "k_proj.weight", "q_b_proj.weight")
            )
            weight.normal_(
                0, (query_key_gain if sharpen else 1.0) * weight.shape[1] ** -0.5
            )
    return _ready(model)


def _draft_of(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Make a draft from the first layers of a target, and quieten the rest.

    The draft then proposes what the target would say but for its later
    layers: often right, often wrong, and always dependent on its own KV.
    """
    config = type(target.config)(
        **{**target.config.to_dict(), "num_hidden_layers": layers}
    )
    draft = _new(config)
    draft.load_state_dict(
        {
            name: weight
            for name, weight in target.state_dict().items()
            if name in draft.state_dict()
        },
    )
    with torch.no_grad():
        for layer in target.model.layers[layers:]:
            layer.self_attn.o_proj.weight.mul_(_LATE_LAYER_GAIN)
            layer.mlp.down_proj.weight.mul_(_LATE_LAYER_GAIN)
    return _ready(draft)
