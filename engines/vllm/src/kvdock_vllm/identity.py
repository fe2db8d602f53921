"""What must be equal for the pages of two vLLM engines to be interchangeable.

vLLM gives a tier the model's name and dtype, and nothing else. The connector sees
the whole configuration: all of it counts, except what `exemptions` lists, and with
it the content of the model's files and what each layer of the workers has become.
What cannot be read is an error, never a default.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import Namespace
from kvdock.errors import KvdockError, NamespaceError, SettingsError
from kvdock.identity import (
    folder_digest,
    identity_fields,
    locate_model,
    model_identity,
    texts_digest,
)
from kvdock_vllm.engine_api import SUPPORTED, installed_version, release
from kvdock_vllm.exemptions import (
    EXEMPTIONS,
    LORA_EXEMPTIONS,
    REPORTED,
    counted_variables,
    ignored_files,
    proposes_without_layers,
    reads_the_folder,
    renames_its_rotary,
)
from kvdock_vllm.foreign_code import foreign_code
from kvdock_vllm.rows import DeviceLayout, Group, expected_layout, shares_of

if TYPE_CHECKING:
    from kvdock_vllm.settings import AdapterSettings

Layers = Mapping[str, Mapping[str, str]]
"""Layer name to what the worker has made of it."""

_SAME_CACHE = {"fp8": "fp8_e4m3"}
_SPELLING = re.compile(r", cache_dtype_str=[^,)]+")
"""How a KV dtype was spelled, which a layer's own says better."""
_HEADS = re.compile(r"\b(num_kv_heads=)\d+")
"""Heads of one rank."""


@attrs.frozen(kw_only=True)
class Identity:
    """What the pages of one engine belong to; the same on all of its ranks.

    Args:
        revision: Which weights and files these are.
        draft: Method and files of a draft model, or "".
        page_format: Everything else that decides what the bytes mean.
        adapters: What else decides about the pages of LoRA adapters.
        stages: Pipeline stages, which have layers of their own.
        process: Names this process among those of its deployment.
        generation: Which weights they are since some were replaced, or "".
    """

    model: str
    revision: str
    draft: str
    page_format: Mapping[str, object]
    adapters: str = ""
    groups: tuple[Group, ...]
    stages: int
    process: str
    generation: str = ""

    def with_layers(self, reports: Iterable[Layers]) -> Identity:
        """Return it with what the workers report instead of what was asked for.

        Raises:
            KvdockError: If two ranks have made different things of one layer.
        """
        layers: dict[str, Mapping[str, str]] = {}
        for report in reports:
            for name, facts in report.items():
                if layers.setdefault(name, facts) != facts:
                    raise KvdockError(
                        f"two ranks have made {layers[name]} and {facts} of {name}",
                        fix="Start all ranks on hosts of one kind.",
                    )
        if not layers:
            return self
        alike: dict[str, list[str]] = {}
        for name, facts in sorted(layers.items()):
            text = ", ".join(f"{fact} {value}" for fact, value in facts.items())
            alike.setdefault(text, []).append(name)
        left = {
            name: value
            for name, value in self.page_format.items()
            if name not in REPORTED
        }
        return attrs.evolve(self, page_format={**left, "layers": alike})

    def namespace(self, own: AdapterSettings) -> Namespace:
        """Return the namespace of the pages."""
        return Namespace(
            model=own.model or self.model,
            revision=self.revision,
            draft_model=self.draft,
            salt=own.salt,
            page_format=json.dumps(self.page_format, sort_keys=True),
            generation=self.generation,
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
    """Read what this engine's pages belong to; raise as `describe` does."""
    return attrs.evolve(describe(config, own), groups=_groups(config, kv, own))


def describe(config: Any, own: AdapterSettings) -> Identity:  # noqa: ANN401 - vLLM's VllmConfig
    """Read what decides about pages before the model is loaded: all but its groups.

    It reads the model's files where no commit says what they hold.

    Raises:
        KvdockError: If something that decides about it cannot be known.
    """
    check_configuration(config)
    # Noted when first asked for, which a worker of this process may have done.
    getattr(config.model_config, "is_mm_prefix_lm", None)
    if callable(read(config, "model_config.hf_overrides")):
        raise KvdockError(
            "hf_overrides is a function, and what it does to the model is not known",
            fix="Pass hf_overrides as a mapping.",
        )
    lora = read(config, "lora_config")
    return Identity(
        model=", ".join(read(config, "model_config.architectures")),
        revision=_files(config, "model_config", own),
        draft=_draft(config, own),
        page_format={
            "engine": "vllm {}.{}".format(*release(installed_version())),
            "platform": _platform(),
            "blocks_per_chunk": own.blocks_per_chunk,
            **({"canonical": _canonical(config)} if own.canonical_layout else {}),
            "runner_v2": bool(read(config, "use_v2_model_runner")),
            "environment": counted_variables(os.environ, _known_variables()),
            **foreign_code(config),
            **_fields_as_read(config),
            **{field: str(read(config, field)) for field in REPORTED},
        },
        adapters=json.dumps(identity_fields(lora, LORA_EXEMPTIONS)) if lora else "",
        groups=(),
        stages=int(read(config, "parallel_config.pipeline_parallel_size")),
        process=f"dp{read(config, 'parallel_config.data_parallel_index')}",
    )


def _fields_as_read(config: Any) -> dict[str, object]:  # noqa: ANN401 - same
    """Return what counts, without what a model has made of its description."""
    found = identity_fields(config, EXEMPTIONS)
    if renames_its_rotary(config.model_config):
        for name, value in found.items():
            if name.endswith(".rope_parameters") and isinstance(value, dict):
                found[name] = {
                    key: one
                    for key, one in value.items()
                    if key != "rope_type" or one == "default"
                }
    return found


def check_configuration(config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Reject a configuration whose pages no engine could find, or a wrong one would.

    Called as soon as vLLM has completed one, that of a draft model too.

    Raises:
        KvdockError: With what to change.
    """
    _check_hash(read(config, "cache_config.prefix_caching_hash_algo"))
    _check_hosts(config)
    if read(config, "model_config.is_encoder_decoder"):
        raise SettingsError(
            "vLLM supports no KV connector for models with an encoder and a decoder",
            fix="Start it without --kv-transfer-config.",
        )


def _known_variables() -> Iterable[str]:
    from vllm import envs  # noqa: PLC0415 - the engine

    known: Mapping[str, object] = envs.environment_variables
    return known.keys()


def layers_of(config: Any, kv: Any) -> dict[str, dict[str, str]]:  # noqa: ANN401 - same
    """Return what this worker has made of each layer that has a KV cache."""
    built = config.compilation_config.static_forward_context
    names = [name for group in kv.kv_cache_groups for name in group.layer_names]
    return {name: _layer(built[name]) for name in names if name in built}


def _layer(layer: Any) -> dict[str, str]:  # noqa: ANN401 - vLLM's AttentionLayerBase
    """Describe a layer; a KV dtype that was named and is the model's is the model's."""
    asked = str(getattr(layer, "kv_cache_dtype", ""))
    actual = getattr(layer, "kv_cache_torch_dtype", None)
    quantized = actual is None or not actual.is_floating_point or "8" in str(actual)
    return {
        "is": type(layer).__name__,
        "by": str(layer.get_attn_backend().get_name()),
        "in": _SAME_CACHE.get(asked, asked) if quantized else str(actual),
    }


def _files(config: Any, field: str, own: AdapterSettings) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    """Return which files a model is made of, by their content."""
    model = read(config, f"{field}.model")
    target = field == "model_config"
    commit = getattr(read(config, f"{field}.hf_config"), "_commit_hash", None) or ""
    revision = read(config, f"{field}.revision") or ""
    cache = read(config, "load_config.download_dir") or ""
    folder = locate_model(model, revision=commit or revision, cache=cache) or model
    ignored = ignored_files(read(config, field))
    if own.revision and target:
        found = own.revision
        if Path(folder).is_dir():
            found += f" texts:{texts_digest(Path(folder), ignored=ignored)}"
    else:
        _check_loader(read(config, "load_config.load_format"))
        found = model_identity(
            str(folder),
            revision=revision,
            commit=commit,
            weights=own.weights,
            ignored=ignored,
        )
    converted = Path(folder) / "np"
    if read(config, "load_config.load_format") == "npcache" and converted.is_dir():
        # Written at the first load, and read from then on whatever the .bin holds.
        found += f" converted {folder_digest(converted)}"
    described = read(config, f"{field}.hf_config_path")
    if described and described != model:
        place = locate_model(described, revision=revision, cache=cache)
        if place is None or not place.is_dir():
            raise NamespaceError(
                f"nothing says what hf_config_path {described!r} holds",
                fix="Pass a folder.",
            )
        found += f" described by {texts_digest(place, ignored=ignored)}"
    return found


def _check_loader(load_format: object) -> None:
    """Reject a loader whose weights are not those of the model's folder."""
    if not reads_the_folder(load_format):
        raise NamespaceError(
            f"load_format {load_format} may read weights from anywhere, and nothing "
            "says which",
            fix='Provide "revision" in the settings, and change it with the weights.',
        )


def _draft(config: Any, own: AdapterSettings) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    spec = read(config, "speculative_config")
    draft = getattr(spec, "draft_model_config", None)
    model = getattr(draft, "model", None)
    same = model == read(config, "model_config.model")
    if not model or same or proposes_without_layers(config):
        return ""
    files = _files(config, "speculative_config.draft_model_config", own)
    return f"{read(spec, 'method')} {files}"


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


def _groups(config: Any, kv: Any, own: AdapterSettings) -> tuple[Group, ...]:  # noqa: ANN401 - vLLM's VllmConfig and KVCacheConfig
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
    layout = layout_of_rows(config, kv, canonical=own.canonical_layout)
    heads = 0
    if own.canonical_layout:
        heads = int(config.model_config.get_total_num_kv_heads())
    dcp_size = int(read(config, "parallel_config.decode_context_parallel_size"))
    return tuple(
        Group(
            number=number,
            spec_class=type(kv.kv_cache_groups[number].kv_cache_spec).__name__,
            spec=_spec(kv.kv_cache_groups[number].kv_cache_spec, heads),
            layers=tuple(kv.kv_cache_groups[number].layer_names),
            tokens=own.blocks_per_chunk
            * resolve_dcp_kv_block_size(
                kv.kv_cache_groups[number].kv_cache_spec, dcp_size
            ),
            pieces=layout.pieces(place, own.blocks_per_chunk),
        )
        for place, number in enumerate(numbers)
    )


def _spec(spec: Any, heads: int) -> str:  # noqa: ANN401 - vLLM's KVCacheSpec
    """Return a specification as text; with all heads of the model where they are given.

    A latent page has one head on every rank.
    """
    text = _SPELLING.sub("", repr(spec))
    return _HEADS.sub(rf"\g<1>{heads}", text) if heads else text


def _canonical(config: Any) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    """Return vLLM's name for the order of a canonical page, with its version."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (  # noqa: PLC0415, E501 - the engine
        canonical_format_id,
    )

    return str(canonical_format_id(read(config, "cache_config.kv_cache_layout")))


def layout_of_rows(config: Any, kv: Any, *, canonical: bool) -> DeviceLayout:  # noqa: ANN401 - vLLM's VllmConfig and KVCacheConfig
    """Return the composition of one rank's slot in a row, or of a canonical row."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (  # noqa: PLC0415 - the engine
        get_offloading_group_ids,
    )

    numbers = get_offloading_group_ids(kv)
    layout = expected_layout(kv, numbers)
    if canonical:
        return layout.over_ranks(shares_of(config, kv, numbers))
    return layout
