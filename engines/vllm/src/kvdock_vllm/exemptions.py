"""What in vLLM's configuration does not change the bytes of a page.

`exemptions.toml` lists the fields with their reasons; here are the conditions under
which some of them hold. The comments name places in vLLM 0.32.0.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdock.identity import Exemption, locate_model, read_exemptions

_MODELS = "vllm.model_executor.models"
_ROTARY = "vllm.model_executor.layers.rotary_embedding"
_CHANGES_FIELDS = f"{_MODELS}.config"
"""Reads everything, and what it does with it is in fields that count themselves."""

_LENGTH = "max_model_len"
_GENERATION = "generation_config"
_RENAMES = 'config.rope_parameters["rope_type"] ='

ROTARY_THAT_READS_A_LENGTH = frozenset({"phi3_long_rope_scaled_rope.py"})
"""Files of rotary embeddings that read `max_model_len`."""


def _one_kind_of_weights(config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether every loader that may be named reads the same files.

    Source: `model_loader/default_loader.py:_prepare_weights`: these differ in how
    they read safetensors, and some fall back to other files where there are none.
    """
    folder = folder_of(config.model_config, config.load_config.download_dir)
    return (
        config.load_config.load_format in _SAME_FILES
        and folder is not None
        and any(folder.glob("model*.safetensors"))
        # Where Mistral's are there, `auto` reads those alone.
        and not any(folder.rglob("consolidated*.safetensors"))
    )


_SAME_FILES = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"}
)


def _loads_as_by_default(config: Any) -> bool:  # noqa: ANN401 - same
    """Return whether a loader's own settings say nothing but how many threads read."""
    load = config.load_config
    given: object = load.model_loader_extra_config
    return load.load_format in _SAME_FILES and (
        isinstance(given, Mapping) and {*given} <= _THREADS
    )


_THREADS = frozenset({"enable_multithread_load", "num_threads", "enable_weights_track"})

_READ_THE_FOLDER = _SAME_FILES | {
    "dummy",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}


def reads_the_folder(load_format: object) -> bool:
    """Return whether the weights that a loader reads are those of the model's folder.

    Others take them from a server or from a place that a setting names, and those of
    plugins from anywhere.

    Source: `model_loader/__init__.py:LoadFormats`.
    """
    return load_format in _READ_THE_FOLDER


def folder_of(model: Any, cache: str | None = None) -> Path | None:  # noqa: ANN401 - vLLM's ModelConfig
    """Return the folder that a model was loaded from; None where it is not known."""
    commit = getattr(model.hf_config, "_commit_hash", None) or ""
    place = locate_model(
        str(model.model), revision=commit or model.revision or "", cache=cache or ""
    )
    return place if place is not None and place.is_dir() else None


def _reads_no_length(model: Any) -> bool:  # noqa: ANN401 - vLLM's ModelConfig
    """Return whether no part of the model reads the length of an engine.

    Llama 4 tunes its attention by it (`models/llama4.py:719`), LongRoPE chooses its
    factors (`phi3_long_rope_scaled_rope.py:54`), MLA cuts its prefill
    (`layers/attention/mla_attention.py:2301`), and modelopt its activations
    (`layers/quantization/modelopt_block_quant.py:337`). Elsewhere in
    `model_executor/layers` it sizes what a kernel works in.
    """
    rotary = json.dumps(_rope_types(model.hf_config))
    return (
        _sources_lack(model, _LENGTH)
        and _rotary_files_that_read_a_length() <= ROTARY_THAT_READS_A_LENGTH
        and not re.search(r"longrope|\"su\"", rotary)
        and not getattr(model, "use_mla", True)
        and "modelopt" not in str(model.quantization)
    )


def _reads_no_generation_config(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether the model leaves defaults of sampling to the sampler."""
    return _sources_lack(model, _GENERATION)


def _is_vllms_class(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether `model_impl` asks for vLLM's own class, and the model has it."""
    asked = model.model_impl in ("auto", "vllm")
    return asked and not model.using_transformers_backend()


def _only_text_is_tokenized(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether the model, in vLLM's own code, takes nothing but token ids."""
    return model.multimodal_config is None and _is_vllms(model)


def _only_vllm_reads_the_folder(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether vLLM's own code alone reads the files of a model of text."""
    from vllm.model_executor.layers.quantization import (  # noqa: PLC0415 - the engine
        get_quantization_config,
    )

    method = model.quantization
    return _only_text_is_tokenized(model) and (
        method is None or get_quantization_config(method).__module__.startswith("vllm.")
    )


def _is_vllms(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether all of the code of a model is vLLM's."""
    modules = _modules(model)
    return (
        bool(modules)
        and all(one.startswith(f"{_MODELS}.") for one in modules)
        and not model.using_transformers_backend()
        and _names_no_code(model)
    )


def _names_no_code(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether no file of a model says where to find code for it."""
    folder = folder_of(model)
    if folder is None or hasattr(model.hf_config, "auto_map"):
        return False
    files = [one for one in folder.glob("*config.json") if one.is_file()]
    return not any(b'"auto_map"' in one.read_bytes() for one in files)


def _overrides_are_described(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether all that `hf_overrides` has changed is recorded.

    Attributes that begin with an underscore are not (`kvdock.identity`).
    """

    def recorded(given: object) -> bool:
        return not isinstance(given, Mapping) or all(
            not str(key).startswith("_") and recorded(one) for key, one in given.items()
        )

    return isinstance(model.hf_overrides, Mapping) and recorded(model.hf_overrides)


def _rope_types(hf_config: Any) -> list[str]:  # noqa: ANN401 - transformers' own
    """Return every text below a key about rotary embeddings, at any depth."""
    found: list[str] = []

    def visit(value: object, inside: bool) -> None:  # noqa: FBT001 - recursion
        if isinstance(value, Mapping):
            for key, below in value.items():
                visit(below, inside or "rope" in str(key))
        elif isinstance(value, list | tuple):
            for below in value:
                visit(below, inside)
        elif inside and isinstance(value, str):
            found.append(value)

    visit(hf_config.to_dict(), inside=False)
    return found


def _modules(model: Any) -> list[str]:  # noqa: ANN401 - same
    registered = model.registry.models
    return [
        getattr(registered.get(name), "module_name", "") for name in model.architectures
    ]


def _sources_lack(model: Any, word: str) -> bool:  # noqa: ANN401 - same
    """Return whether no module of the model's has a word; False if not known."""
    modules = _modules(model)
    if not modules or not all(one.startswith(f"{_MODELS}.") for one in modules):
        return False
    return not any(word in _source(one) for one in _with_imports(modules))


def renames_its_rotary(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether a model writes the type of its rotary embedding when it is built.

    Models of DeepSeek's do, by the rest of its parameters, in the process that builds
    them (`models/deepseek_v2.py:543`): the scheduler's, or a worker's.
    """
    ours = [one for one in _modules(model) if one.startswith(f"{_MODELS}.")]
    return any(_RENAMES in _source(one) for one in _with_imports(ours))


def _with_imports(modules: Iterable[str]) -> Iterator[str]:
    """Yield modules, and those models that they import, each once."""
    ahead, seen = list(modules), {_CHANGES_FIELDS}
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            yield module
            ahead.extend(_imports(module))


@cache
def _imports(module: str) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(_source(module))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = f"{_MODELS}." if node.level == 1 else ""
        if not base and not (node.module or "").startswith(_MODELS):
            continue
        names = [f"{base}{node.module}"] if node.module else []
        for name in names or [f"{base}{one.name}" for one in node.names]:
            if find_spec(name) is not None:
                found.add(name)
    return frozenset(found)


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None  # noqa: S101 - the registry's, or it was just found
    assert spec.origin is not None  # noqa: S101 - a file
    return Path(spec.origin).read_text(encoding="utf-8")


@cache
def _rotary_files_that_read_a_length() -> frozenset[str]:
    spec = find_spec(_ROTARY)
    assert spec is not None  # noqa: S101 - part of vLLM
    folders = spec.submodule_search_locations or ()
    files = [one for folder in folders for one in Path(folder).glob("*.py")]
    return frozenset(one.name for one in files if _LENGTH in one.read_text())


def proposes_without_layers(config: Any) -> bool:  # noqa: ANN401 - same
    """Return whether proposing tokens adds no layer that has pages."""
    speculative = config.speculative_config
    return speculative is None or speculative.method in _WITHOUT_LAYERS


_WITHOUT_LAYERS = frozenset(
    {"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"}
)


def _replicas_compute_alone(config: Any) -> bool:  # noqa: ANN401 - same
    """Return whether no layer is divided among replicas.

    Experts are, by tensor where not by expert (`layers/fused_moe/config.py:1145`), so
    their sums are added up in another order.
    """
    return not config.model_config.is_moe


def _rows_are_canonical(config: Any) -> bool:  # noqa: ANN401 - same
    """Return whether pages are stored as engines of all TP sizes have them."""
    given = getattr(config.kv_transfer_config, "kv_connector_extra_config", {})
    return bool(given.get("canonical_layout"))


def _tokenizer_is_the_models(model: Any) -> bool:  # noqa: ANN401 - vLLM's ModelConfig
    """Return whether its files are among the model's, or only text is tokenized."""
    return model.multimodal_config is None or model.tokenizer == model.model


def _describes_the_model(model: Any) -> bool:  # noqa: ANN401 - same
    """Return whether the text model's description is a part of the whole one."""
    whole, text = model.hf_config, model.hf_text_config
    return text is whole or any(one is text for one in vars(whole).values())


def _holds_for(holds: Callable[[Any], bool], group: str, config: object) -> bool:
    """Return whether a condition holds for a group's model; not without one."""
    model: object = config
    for name in group.split("."):
        model = getattr(model, name, None)
    return model is not None and holds(model)


def _of_a_model(group: str) -> tuple[Exemption, ...]:
    """Return the exemptions of a `ModelConfig`, the target's or a draft's."""
    conditions = {
        "describes_the_model": _describes_the_model,
        "is_vllms_class": _is_vllms_class,
        "names_no_code": _names_no_code,
        "overrides_are_described": _overrides_are_described,
        "reads_no_generation_config": _reads_no_generation_config,
        "reads_no_length": _reads_no_length,
        "tokenizer_is_the_models": _tokenizer_is_the_models,
    }
    bound = {
        name: partial(_holds_for, holds, group) for name, holds in conditions.items()
    }
    return read_exemptions(_LISTED["model"], group, bound)


def ignored_files(model: Any) -> Callable[[str], bool]:  # noqa: ANN401 - vLLM's ModelConfig
    """Return what says, of a file's name, whether no page of a model depends on it."""
    conditions = {
        "reads_no_generation_config": _reads_no_generation_config,
        "only_text_is_tokenized": _only_text_is_tokenized,
        "only_vllm_reads_the_folder": _only_vllm_reads_the_folder,
    }
    listed = [
        one for one in _LISTED["beside_weights"] if conditions[one["when"]](model)
    ]

    def ignored(name: str) -> bool:
        return any(
            _is_among(name, one["names"]) and not _is_among(name, one.get("but", ""))
            for one in listed
        )

    return ignored


def _is_among(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, one) for one in patterns.split())


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_REPORTED = read_exemptions(_LISTED["reported"])

EXEMPTIONS: tuple[Exemption, ...] = (
    *_of_a_model("model_config"),
    *_of_a_model("speculative_config.draft_model_config"),
    *read_exemptions(
        _LISTED["exempt"],
        conditions={
            "loads_as_by_default": _loads_as_by_default,
            "one_kind_of_weights": _one_kind_of_weights,
            "proposes_without_layers": proposes_without_layers,
            "replicas_compute_alone": _replicas_compute_alone,
            "rows_are_canonical": _rows_are_canonical,
        },
    ),
    *_REPORTED,
)
"""Fields of vLLM's `VllmConfig`."""

REPORTED: Mapping[str, str] = MappingProxyType(
    {one.field: one.reason for one in _REPORTED}
)
"""Fields that are exempt because workers report what they have become."""

LORA_EXEMPTIONS: tuple[Exemption, ...] = read_exemptions(_LISTED["lora"])
"""Fields of vLLM's `LoRAConfig`, for the pages of adapters."""

HARMLESS_VARIABLES = re.compile(
    f"VLLM_(?:{'|'.join(_LISTED['harmless_variables'].split())})"
)
"""Variables of vLLM's about places, times, processes and logs (`vllm/envs.py`)."""

LOSSY_VARIABLES = re.compile("|".join(_LISTED["lossy_variables"].split()))
"""Variables of libraries below vLLM that make arithmetic coarser."""


def counted_variables(
    environ: Mapping[str, str], known: Iterable[str]
) -> dict[str, str]:
    """Return the variables that are set and may change what vLLM computes.

    Of vLLM's, only names that it reads are `known`: a cluster may set others that begin
    alike. Those of libraries are listed.
    """
    vllms = {
        name
        for name in known
        if name.startswith("VLLM_") and not HARMLESS_VARIABLES.fullmatch(name)
    }
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in vllms or LOSSY_VARIABLES.fullmatch(name)
    }
