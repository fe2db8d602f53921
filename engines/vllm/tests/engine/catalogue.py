"""Variations that every release of vLLM is held against.

The wrong ones were full hits with other tokens once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm_models
from variations import (
    HIT,
    Variation,
    adapters,
    beside_the_weights,
    consolidated,
    described,
    edited,
    indented,
    linked,
    moved,
    noted,
    own_code,
    own_package,
    sampled,
    with_stale_copy,
    without_copy,
    worded,
)
from vllm_lives import prompts

_PICTURE: dict[str, Any] = {
    "image": 1,
    "prompts": [[5, 6, 7, 260, *range(10, 60)], [9, 8, 7, 260, *range(70, 120)]],
    "engine": {"limit_mm_per_prompt": {"image": 1}},
}
_FP8: dict[str, Any] = {
    "engine": {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
}
_LORA: dict[str, Any] = {
    "engine": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
}


def _other_mean(data: dict[str, Any]) -> None:
    data["image_processor"]["image_mean"] = [0.0, 0.0, 0.0]


def _behind_path(model: Path) -> dict[str, Any]:
    return {"engine": {"hf_config_path": str(model / "described")}}


def _adapter(model: Path) -> dict[str, Any]:
    return {"lora": {"path": str(model / "used")}}


def _rolled_out(model: Path) -> dict[str, Any]:
    """Replace an adapter while it is loaded, and ask for other prompts."""
    return {
        **_adapter(model),
        "rounds": 2,
        "swap": [str(model / "two"), str(model / "used")],
        "later_prompts": [[(5 * n + 9) % 500 + 4 for n in range(100)]],
    }


def _loaded_in_place(model: Path) -> dict[str, Any]:
    """Replace and load an adapter in place, and go on from what vLLM has cached."""
    return {
        **_rolled_out(model),
        "forget_host": True,
        "later_lora": {"path": str(model / "used"), "load_inplace": True},
        "later_prompts": [[*one, *range(50, 150)] for one in prompts(96)],
    }


def _other_weights(model: Path) -> None:
    """Put weights of the same shapes beside a model."""
    vllm_models.make(vllm_models.FAMILIES["llama_other"], model)


def _reloaded(model: Path) -> dict[str, Any]:
    """Replace the weights of a running engine, and ask for other prompts."""
    return {
        "rounds": 2,
        "reload": str(model / "llama_other"),
        "later_prompts": [[(5 * n + 9) % 500 + 4 for n in range(100)]],
    }


WRONG = (
    Variation(
        name="max_model_len across LongRoPE's limit",
        family="long_rope",
        base={"engine": {"max_model_len": 512}},
        look={"engine": {"max_model_len": 1024}},
        quick=True,
    ),
    Variation(
        name="max_model_len above 32,768 (Llama 4)",
        family="tuned",
        look={"engine": {"max_model_len": 40000}},
    ),
    Variation(
        name="attn_temperature_tuning (Llama 4)",
        family="tuned",
        look={
            "engine": {"override_generation_config": {"attn_temperature_tuning": True}}
        },
    ),
    Variation(
        name="quantization_config.ignore (online fp8)",
        base=_FP8,
        look={
            "engine": {
                "quantization_config": {
                    "ignore": ["model.layers.0.self_attn.qkv_proj"],
                }
            }
        },
    ),
    Variation(
        name="mm_processor_kwargs with the same image",
        family="images",
        base=_PICTURE,
        look={"engine": {"mm_processor_kwargs": {"do_normalize": False}}},
        quick=True,
    ),
    Variation(
        name="an image under the name of another one",
        family="images",
        base={**_PICTURE, "image": 2, "image_named_as": 1},
        look={"image": 1, "image_named_as": None},
        quick=True,
    ),
    Variation(
        name="another image under the same name",
        family="images",
        base={**_PICTURE, "image_name": "logo"},
        look={"image": 2},
    ),
    Variation(
        name="processor_config.json replaced in place",
        family="images",
        base=_PICTURE,
        edit=edited("processor_config.json", _other_mean),
    ),
    Variation(
        name="configuration_*.py replaced in place",
        base={"engine": {"trust_remote_code": True}},
        prepare=own_code(10000.0),
        edit=own_code(50.0),
    ),
    Variation(
        name="the folder behind hf_config_path replaced in place",
        within=_behind_path,
        prepare=described(10000.0),
        edit=described(50.0),
    ),
    Variation(
        name="lora_target_modules",
        base=_LORA,
        within=_adapter,
        prepare=adapters,
        look={"engine": {**_LORA["engine"], "lora_target_modules": ["o_proj"]}},
    ),
    Variation(
        name="an adapter replaced while it is loaded",
        base=_LORA,
        within=_rolled_out,
        prepare=adapters,
        quick=True,
    ),
    Variation(
        name="an adapter loaded in place",
        base=_LORA,
        within=_loaded_in_place,
        prepare=adapters,
    ),
    Variation(
        name="weights replaced in a running engine",
        within=_reloaded,
        prepare=_other_weights,
        quick=True,
    ),
    Variation(
        name="a worker of one's own",
        look={"engine": {"worker_cls": "own_worker.worker.Own"}},
        code=own_package("worker", 1),
        quick=True,
    ),
    Variation(
        name="another file behind a worker of one's own",
        base={"engine": {"worker_cls": "own_worker.worker.Own"}},
        code=own_package("worker", 1),
        later_code=own_package("worker", 2),
    ),
    Variation(
        name="a plugin with operators of its own",
        code=own_package("operators", 1, plugin=True),
        code_of_both=False,
        quick=True,
    ),
    Variation(
        name="another file of a plugin with operators",
        code=own_package("operators", 1, plugin=True),
        later_code=own_package("operators", 2, plugin=True),
    ),
    Variation(
        name="another file of a plugin with a model's class",
        code=own_package("model", 1, plugin=True),
        later_code=own_package("model", 2, plugin=True),
    ),
    Variation(
        name="a load_format that reads other files of the folder",
        prepare=consolidated,
        base={"engine": {"load_format": "safetensors"}},
        look={"engine": {"load_format": "auto"}},
    ),
    Variation(
        name="npcache with a converted copy of other weights",
        prepare=with_stale_copy,
        elsewhere=without_copy,
        base={"engine": {"load_format": "npcache"}},
    ),
    Variation(name="weights", look={"engine": {"load_format": "dummy"}}),
    Variation(name="dtype", look={"engine": {"dtype": "bfloat16"}}),
    Variation(name="block size", look={"engine": {"block_size": 64}}),
    Variation(name="chunk size", look={"storage": {"blocks_per_chunk": 2}}),
    Variation(
        name="rope theta, by hf_overrides",
        look={
            "engine": {
                "hf_overrides": {
                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
                }
            }
        },
    ),
    Variation(
        name="model_impl",
        look={"engine": {"model_impl": "transformers"}},
    ),
    Variation(
        name="model_class_overrides",
        look={
            "engine": {
                "model_class_overrides": {
                    "LlamaForCausalLM": "vllm.model_executor.models.llama"
                    ":LlamaForCausalLM"
                }
            }
        },
    ),
    Variation(
        name="the window is switched off",
        family="swa",
        look={"engine": {"disable_sliding_window": True}},
        # Without it vLLM takes the window for the longest prompt.
        environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    ),
    Variation(
        name="groups are managed as one",
        family="swa_full",
        look={"engine": {"disable_hybrid_kv_cache_manager": True}},
    ),
    Variation(
        name="additional_config",
        look={"engine": {"additional_config": {"an": "unknown thing"}}},
    ),
    Variation(
        name="YaRN, by hf_overrides",
        look={
            "engine": {
                "hf_overrides": {
                    "rope_parameters": {
                        "rope_type": "yarn",
                        "rope_theta": 10000.0,
                        "factor": 4.0,
                        "original_max_position_embeddings": 1024,
                    }
                }
            }
        },
    ),
    Variation(
        name="a variable that is not listed",
        environ={"VLLM_FLOAT32_MATMUL_PRECISION": "high"},
    ),
    Variation(
        name="a variable of oneDNN's",
        environ={"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    ),
    Variation(
        name="pictures of a prompt (LLaVA)",
        family="images",
        base=_PICTURE,
        look={"engine": {"limit_mm_per_prompt": {"image": 2}}},
    ),
)
"""What must be a miss."""


def _same(name: str, quick: bool = False, **engine: Any) -> Variation:  # noqa: FBT001, FBT002 - a word beside the others
    return Variation(name=name, expect=HIT, look={"engine": engine}, quick=quick)


_SCHEDULING: dict[str, Any] = {
    "long_prefill_token_threshold": 64,
    "max_num_scheduled_tokens": 512,
    "max_num_active_seqs": 3,
    "scheduler_reserve_full_isl": False,
    "stream_interval": 3,
    "watermark": 0.1,
}
_SERVING: dict[str, Any] = {
    "max_logprobs": 30,
    "logprobs_mode": "raw_logits",
    "generation_config": "vllm",
    "allowed_media_domains": ["example.org"],
    "use_fp64_gumbel": True,
    "shutdown_timeout": 3,
    "structured_outputs_config": {"backend": "guidance"},
}
_REPORTING: dict[str, Any] = {
    "kv_cache_metrics": True,
    "show_hidden_metrics_for_version": "0.31",
    "enable_logging_iteration_details": True,
    "kv_events_config": {"enable_kv_cache_events": False, "topic": "kv"},
}
_LOADING: dict[str, Any] = {
    "safetensors_load_strategy": "eager",
    "use_tqdm_on_load": False,
    "download_dir": "/tmp",  # noqa: S108 - nothing is downloaded
    "max_parallel_loading_workers": 1,
}
_COMPILING: dict[str, Any] = {
    "optimization_level": 1,
    "performance_mode": "throughput",
    "enable_flashinfer_autotune": False,
    "compilation_config": {"custom_ops": ["all"]},
}
_ROOM: dict[str, Any] = {
    "gpu_memory_utilization": 0.5,
    "num_gpu_blocks_override": 300,
    "distributed_timeout_seconds": 99,
}

SAME = (
    _same("nothing", quick=True),
    _same("scheduling, many at once", **_SCHEDULING),
    _same("serving and sampling, many at once", **_SERVING),
    _same("reports, many at once", **_REPORTING),
    _same("loading, many at once", **_LOADING),
    _same("compilation, many at once", **_COMPILING),
    _same("room for pages, many at once", **_ROOM),
    _same("no tokenizer", skip_tokenizer_init=True),
    Variation(
        name="steps of 64 tokens (LongRoPE)",
        family="long_rope",
        expect=HIT,
        base={"engine": {"max_model_len": 1024}, "prompts": prompts(640)},
        look={"engine": {"max_num_batched_tokens": 64}},
    ),
    Variation(
        name="steps of 64 tokens (windows)",
        family="swa_full",
        expect=HIT,
        look={"engine": {"max_num_batched_tokens": 64}},
    ),
    Variation(
        name="how pictures are cached (LLaVA)",
        family="images",
        expect=HIT,
        base=_PICTURE,
        look={"engine": {"mm_processor_cache_gb": 0, "skip_mm_profiling": True}},
    ),
    Variation(
        name="room for adapters, many at once",
        expect=HIT,
        base=_LORA,
        within=_adapter,
        prepare=adapters,
        look={"engine": {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 16}},
    ),
    Variation(
        name="variables about places and logs",
        expect=HIT,
        environ={
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_RPC_TIMEOUT": "9999",
            "VLLM_IMAGE_TAG": "of another build",
            "VLLM_MAX_N_SEQUENCES": "7",
        },
    ),
    _same("max_num_seqs", max_num_seqs=2),
    _same("max_num_batched_tokens", max_num_batched_tokens=2048),
    _same("memory", kv_cache_memory_bytes=1 << 28),
    _same("log level", disable_log_stats=True),
    _same("served name", served_model_name="another"),
    _same("seed", seed=7),
    _same("async scheduling", async_scheduling=True),
    _same("chunked prefill", enable_chunked_prefill=False),
    _same("scheduling policy", scheduling_policy="priority"),
    _same("enable_lora", enable_lora=True),
    _same("length", max_model_len=768),
    _same("load_format", load_format="safetensors"),
    _same("attention backend, named", attention_backend="CPU_ATTN", quick=True),
    Variation(
        name="KV dtype, named",
        expect=HIT,
        base={"engine": {"dtype": "bfloat16"}},
        look={"engine": {"kv_cache_dtype": "bfloat16"}},
    ),
    _same("sampling", override_generation_config={"top_k": 3}),
    _same(
        "ngram",
        quick=True,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        },
    ),
    Variation(
        name="dtype, chosen from the files",
        expect=HIT,
        # Of weights in float32 vLLM makes bfloat16.
        base={"engine": {"dtype": "bfloat16"}},
        look={"engine": {"dtype": "auto"}},
    ),
    Variation(
        name="files beside the weights, many at once",
        expect=HIT,
        edit=beside_the_weights,
        quick=True,
    ),
    Variation(name="generation_config.json", expect=HIT, edit=sampled),
    Variation(name="chat template and tokenizer files", expect=HIT, edit=worded),
    Variation(name="a further .json file", expect=HIT, edit=noted),
    Variation(name="another indent of config.json", expect=HIT, edit=indented),
    _same(
        "hf_overrides that change nothing, trust_remote_code without code, "
        "enable_prompt_embeds",
        quick=True,
        hf_overrides={"vocab_size": vllm_models.VOCABULARY},
        trust_remote_code=True,
        enable_prompt_embeds=True,
    ),
    _same(
        "hf_overrides that change nothing",
        hf_overrides={"vocab_size": vllm_models.VOCABULARY},
    ),
    _same("trust_remote_code without code", trust_remote_code=True),
    _same("enable_prompt_embeds", enable_prompt_embeds=True),
    Variation(
        name="2 draft tokens for 3",
        family="draft",
        expect=HIT,
        look={"draft_tokens": 2},
        quick=True,
    ),
    Variation(
        name="2 draft tokens for 3 (EAGLE)",
        family="eagle",
        expect=HIT,
        look={"draft_tokens": 2},
    ),
    Variation(
        name="a plugin that is not loaded",
        expect=HIT,
        code=own_package("operators", 1, plugin=True),
        code_of_both=False,
        environ={"VLLM_PLUGINS": "kvdock,kvdock_cpu_copies"},
    ),
    Variation(
        name="a worker of one's own, the same",
        expect=HIT,
        base={"engine": {"worker_cls": "own_worker.worker.Own"}},
        code=own_package("worker", 1),
    ),
    Variation(
        name="a plugin with operators, the same",
        expect=HIT,
        code=own_package("operators", 1, plugin=True),
    ),
    Variation(name="folder", expect=HIT, elsewhere=moved, quick=True),
    Variation(name="link", expect=HIT, elsewhere=linked),
    Variation(
        name="host memory", expect=HIT, look={"storage": {"host_memory": "32 MiB"}}
    ),
    Variation(
        name="eviction", expect=HIT, look={"storage": {"eviction_policy": "arc"}}
    ),
    Variation(
        name="prompt_only",
        expect=HIT,
        look={"storage": {"offload_prompt_only": True}},
    ),
    Variation(
        name="an adapter, the same",
        expect=HIT,
        base=_LORA,
        within=_adapter,
        prepare=adapters,
    ),
    Variation(name="an image, the same", expect=HIT, family="images", base=_PICTURE),
    Variation(name="online fp8, the same", expect=HIT, base=_FP8),
    Variation(name="LongRoPE, the same", expect=HIT, family="long_rope"),
    Variation(name="Llama 4, the same", expect=HIT, family="tuned"),
    Variation(
        name="chunked attention (Llama 4), the same", expect=HIT, family="chunked"
    ),
    Variation(
        name="Cohere2 in pages of two blocks, the same",
        expect=HIT,
        family="window_past",
        base={"storage": {"blocks_per_chunk": 2}},
    ),
    Variation(
        name="a model of embeddings, the same",
        expect=HIT,
        base={"embed": True, "engine": {"runner": "pooling", "convert": "embed"}},
    ),
    Variation(
        name="own code, the same",
        expect=HIT,
        base={"engine": {"trust_remote_code": True}},
        prepare=own_code(10000.0),
    ),
)
"""What must stay a hit."""

ALL = (*WRONG, *SAME)
