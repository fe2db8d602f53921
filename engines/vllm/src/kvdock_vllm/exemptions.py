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
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdock.identity import Exemption, read_exemptions

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
    folder = Path(str(config.model_config.model))
    return config.load_config.load_format in _SAME_FILES and (
        not folder.is_dir() or any(folder.glob("model*.safetensors"))
    )


_SAME_FILES = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"}
)


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


def _proposes_without_a_model(config: Any) -> bool:  # noqa: ANN401 - same
    """Return whether drafts are found in the prompt, so that no layer is added."""
    speculative = config.speculative_config
    return speculative is None or speculative.method in ("ngram", "suffix")


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
        "reads_no_generation_config": _reads_no_generation_config,
        "reads_no_length": _reads_no_length,
        "tokenizer_is_the_models": _tokenizer_is_the_models,
    }
    bound = {
        name: partial(_holds_for, holds, group) for name, holds in conditions.items()
    }
    return read_exemptions(_LISTED["model"], group, bound)


_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_REPORTED = read_exemptions(_LISTED["reported"])

EXEMPTIONS: tuple[Exemption, ...] = (
    *_of_a_model("model_config"),
    *_of_a_model("speculative_config.draft_model_config"),
    *read_exemptions(
        _LISTED["exempt"],
        conditions={
            "one_kind_of_weights": _one_kind_of_weights,
            "proposes_without_a_model": _proposes_without_a_model,
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


def counted_variables(
    environ: Mapping[str, str], known: Iterable[str]
) -> dict[str, str]:
    """Return the variables of vLLM's that are set and may change what it computes.

    Only names that vLLM reads are `known`: a cluster may set others that begin alike.
    """
    return {
        name: environ[name]
        for name in sorted(known)
        if name.startswith("VLLM_")
        and name in environ
        and not HARMLESS_VARIABLES.fullmatch(name)
    }
