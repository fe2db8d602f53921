"""What must be equal for the pages of two vLLM engines to be interchangeable.

vLLM gives a tier the model's name and dtype, and nothing else. The connector sees
the whole configuration, and everything in it that decides what a page's bytes mean
is read here. What cannot be read is an error, never a default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Namespace
from kvdock.errors import KvdockError, SettingsError
from kvdock_vllm.engine_api import SUPPORTED, installed_version, release
from kvdock_vllm.rows import Group, expected_layout
from kvdock_vllm.weights import weights_identity

if TYPE_CHECKING:
    from kvdock_vllm.settings import AdapterSettings

FORMAT = MappingProxyType(
    {
        "dtype": "model_config.dtype",
        "quantization": "model_config.quantization",
        "hf_overrides": "model_config.hf_overrides",
        "hf_config_path": "model_config.hf_config_path",
        "load_format": "load_config.load_format",
        "attention": "attention_config.backend",
        "cache_dtype": "cache_config.cache_dtype",
        "cache_dtype_skips": "cache_config.kv_cache_dtype_skip_layers",
        "layout": "cache_config.kv_cache_layout",
        "block_size": "cache_config.block_size",
        "hash": "cache_config.prefix_caching_hash_algo",
        "mamba_dtype": "cache_config.mamba_cache_dtype",
        "mamba_ssm_dtype": "cache_config.mamba_ssm_cache_dtype",
        "mamba_mode": "cache_config.mamba_cache_mode",
        "mamba_block_size": "cache_config.mamba_block_size",
        "tp": "parallel_config.tensor_parallel_size",
        "pp": "parallel_config.pipeline_parallel_size",
        "pcp": "parallel_config.prefill_context_parallel_size",
        "dcp": "parallel_config.decode_context_parallel_size",
        "runner_v2": "use_v2_model_runner",
    }
)
"""Name in the namespace record to the field of vLLM's configuration."""


@attrs.frozen(kw_only=True)
class Identity:
    """What the pages of one engine belong to; the same on all of its ranks.

    Args:
        model: The model's name, without its folder.
        revision: Which weights these are.
        draft: Method and weights of a draft model, or "".
        page_format: Everything else that decides what the bytes mean.
        groups: The KV cache groups that vLLM offloads.
        stages: Pipeline stages, which have layers of their own.
        process: Names this process among those of its deployment.
    """

    model: str
    revision: str
    draft: str
    page_format: Mapping[str, object]
    groups: tuple[Group, ...]
    stages: int
    process: str

    def namespace(self, own: AdapterSettings) -> Namespace:
        """Return the namespace of the pages."""
        return Namespace(
            model=own.model or self.model,
            revision=self.revision,
            draft_model=self.draft,
            salt=own.salt,
            page_format=json.dumps(self.page_format, sort_keys=True),
        )


def read(config: Any, field: str) -> Any:  # noqa: ANN401 - vLLM's VllmConfig and its fields
    """Return a field of vLLM's configuration, by its dotted name.

    Raises:
        KvdockError: If this vLLM has no such field.
    """
    found = config
    for name in field.split("."):
        if not hasattr(found, name):
            raise KvdockError(
                f"the configuration of vLLM {installed_version()} has no {field}, so "
                "engines that differ in it could share pages",
                fix=f"Use {SUPPORTED}, or a kvdock-vllm that was made for yours.",
            )
        found = getattr(found, name)
    return found


def identify(config: Any, kv: Any, own: AdapterSettings) -> Identity:  # noqa: ANN401 - vLLM's VllmConfig and KVCacheConfig
    """Read what this engine's pages belong to.

    It reads the model's files where nothing else says which weights these are.

    Raises:
        KvdockError: If something that decides about it cannot be known.
    """
    _check_hash(read(config, "cache_config.prefix_caching_hash_algo"))
    _check_hosts(config)
    _check_fixed_weights(config)
    overrides = read(config, "model_config.hf_overrides")
    if callable(overrides):
        raise KvdockError(
            "hf_overrides is a function, and what it does to the model is not known",
            fix="Pass hf_overrides as a mapping.",
        )
    model = read(config, "model_config.model")
    version = release(installed_version())
    page_format: dict[str, object] = {
        "engine": "vllm {}.{}".format(*version),
        "platform": _platform(),
        "blocks_per_chunk": own.blocks_per_chunk,
        **{name: _text(read(config, field)) for name, field in FORMAT.items()},
    }
    return Identity(
        model=_name(model),
        revision=own.revision
        or weights_identity(
            model,
            revision=read(config, "model_config.revision") or "",
            commit=getattr(read(config, "model_config.hf_config"), "_commit_hash", None)
            or "",
        ),
        draft=_draft(config),
        page_format=page_format,
        groups=_groups(config, kv, own.blocks_per_chunk),
        stages=int(read(config, "parallel_config.pipeline_parallel_size")),
        process=f"dp{read(config, 'parallel_config.data_parallel_index')}",
    )


def _name(model: str) -> str:
    """Return a model's name, for a path without the folder that it lies in."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _text(value: object) -> object:
    """Return a value as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _text(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_text(one) for one in value]
    return str(value)


def _draft(config: Any) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    spec = read(config, "speculative_config")
    if spec is None:
        return ""
    method = str(read(spec, "method"))
    draft = read(spec, "draft_model_config")
    model = getattr(draft, "model", None)
    if not model or model == read(config, "model_config.model"):
        return method
    weights = weights_identity(
        model,
        revision=read(draft, "revision") or "",
        commit=getattr(read(draft, "hf_config"), "_commit_hash", None) or "",
    )
    kind = f"{read(draft, 'dtype')} {read(draft, 'quantization')}"
    return f"{method} {_name(model)} {weights} {kind}"


def _check_hash(algorithm: str) -> None:
    """Reject block hashes that no other process would have."""
    if not str(algorithm).startswith("sha256") and not os.environ.get("PYTHONHASHSEED"):
        raise SettingsError(
            f"vLLM's block hashes are {algorithm} with a seed of this process alone, "
            "so another process would never find a page",
            fix="Set PYTHONHASHSEED to the same number everywhere, or use "
            "--prefix-caching-hash-algo sha256.",
        )


def _check_hosts(config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Reject an engine whose ranks are on several hosts."""
    hosts = int(read(config, "parallel_config.nnodes_within_dp"))
    if hosts > 1:
        raise SettingsError(
            f"the ranks of this engine are on {hosts} hosts, and the scheduler sees "
            "the host memory of its own alone",
            fix="Use one host for each replica (tensor and pipeline ranks together).",
        )


def _check_fixed_weights(config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Reject an engine whose weights are replaced while it runs.

    A connector is not informed of it, and pages of the old weights would be found
    by requests to the new ones.
    """
    if read(config, "weight_transfer_config") is not None:
        raise SettingsError(
            "this engine takes new weights at run time (weight_transfer_config), and "
            "its stored pages would be found by requests to other weights",
            fix="Start it without weight_transfer_config, or without this connector.",
        )


def _platform() -> str:
    """Return the kind of device: attention kernels choose their layouts by it."""
    import torch  # noqa: PLC0415 - the engine's
    from vllm.platforms import current_platform  # noqa: PLC0415 - the engine

    kind = str(current_platform.device_type)
    if current_platform.is_cpu():
        # Kernels for the CPU pack keys by the instructions that it has.
        amx = bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - the only question for it
        return f"{kind} {torch.backends.cpu.get_cpu_capability()} amx={amx}"
    return f"{kind} {current_platform.get_device_capability()}"


def _groups(config: Any, kv: Any, blocks_per_chunk: int) -> tuple[Group, ...]:  # noqa: ANN401 - vLLM's VllmConfig and KVCacheConfig
    """Describe the groups that vLLM offloads."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (  # noqa: PLC0415 - the engine
        get_offloading_group_ids,
        resolve_dcp_kv_block_size,
    )

    if read(kv, "hisparse_host_num_blocks") is not None:
        raise KvdockError(
            "this engine keeps KV cache in host memory itself (HiSparse), which "
            "kvdock-vllm does not store",
            fix="Start it without hisparse_config.",
        )
    numbers = get_offloading_group_ids(kv)
    layout = expected_layout(kv, numbers)
    dcp_size = int(read(config, "parallel_config.decode_context_parallel_size"))
    return tuple(
        Group(
            number=number,
            spec_class=type(kv.kv_cache_groups[number].kv_cache_spec).__name__,
            spec=repr(kv.kv_cache_groups[number].kv_cache_spec),
            layers=tuple(kv.kv_cache_groups[number].layer_names),
            tokens=blocks_per_chunk
            * resolve_dcp_kv_block_size(
                kv.kv_cache_groups[number].kv_cache_spec, dcp_size
            ),
            pieces=layout.pieces(place, blocks_per_chunk),
        )
        for place, number in enumerate(numbers)
    )
