"""Which launch arguments of SGLang decide what the bytes of a page mean.

All of them do, except those that `launch_arguments.toml` lists, each with the reason
why a page holds the same whatever they say. An argument that the list does not know, as
of a newer release, keeps its pages apart.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.errors import NamespaceError
from kvdock.identity import (
    Exemption,
    WeightsBy,
    canonical_value,
    files_digest,
    read_exemptions,
    texts_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SPECULATIVE = ("speculative_", "_speculative_", "decrypted_draft_", "uno_", "spec_")
"""How names of launch arguments about a draft model begin."""

WITHOUT_DRAFT = frozenset({"", "NGRAM"})
"""Algorithms that propose tokens without a model, and so without pages."""

_SAME_WEIGHTS = frozenset(
    {
        "auto",
        "safetensors",
        "pt",
        "npcache",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "runai_streamer",
    }
)
"""Load formats that read the same tensors of the same files, in another way.

Source: SGLang 0.5.23, `model_loader/loader.py:get_model_loader`.
"""

_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_LORA = read_exemptions(_LISTED["lora"])

EXEMPTIONS: tuple[Exemption, ...] = (*read_exemptions(_LISTED["exempt"]), *_LORA)
"""Launch arguments that do not change the bytes of a page."""

LORA_ARGUMENTS = tuple(one.field for one in _LORA)
"""Launch arguments that change the pages of requests with an adapter alone."""


def identity_arguments(
    resolved: Mapping[str, object], *, adapters_known: bool = True
) -> dict[str, object]:
    """Return what counts of SGLang's resolved launch arguments, as plain data.

    The arguments about adapters count unless their content is known to be in the page
    hashes of their requests.
    """
    exempt = {one.field for one in EXEMPTIONS}
    if not adapters_known:
        exempt -= set(LORA_ARGUMENTS)
    if str(resolved.get("speculative_algorithm") or "") in WITHOUT_DRAFT:
        exempt |= {name for name in resolved if is_speculative(name)}
    counted: dict[str, object] = {
        name: canonical_argument(name, value)
        for name, value in resolved.items()
        if name not in exempt
    }
    return {name: value for name, value in counted.items() if not _left_alone(value)}


def is_speculative(name: str) -> bool:
    """Return whether a launch argument is about speculative decoding."""
    return name.startswith(_SPECULATIVE) or name == "enable_multi_layer_eagle"


def _left_alone(value: object) -> bool:
    return value is None or value is False or value in ("", "{}", "auto", [], {})


def canonical_argument(name: str, value: object) -> object:
    """Return one value for all spellings of an argument that mean the same.

    A path counts by what lies there, JSON text by what it says.
    """
    if name in ("load_format", "speculative_draft_load_format"):
        return "" if str(value) in _SAME_WEIGHTS else str(value)
    if name == "lora_paths":
        return list(_adapters(value))
    if isinstance(value, str):
        if value.startswith("{"):
            try:
                value = json.loads(value)
            except ValueError:
                return value
        elif path := _existing(value):
            return _content(path)
    return canonical_value(value, where=name)


def _existing(text: str) -> Path | None:
    # A plain word may be the name of a file in the working directory by chance.
    path = Path(text)
    try:
        return path if len(path.parts) > 1 and path.exists() else None
    except OSError:
        return None


def _content(path: Path) -> str:
    if path.is_dir():
        try:
            return f"files:{files_digest(path, weights=WeightsBy.HEADERS)}"
        except NamespaceError:  # without weights
            return f"texts:{texts_digest(path)}"
    with path.open("rb") as data:
        return f"file:{hashlib.file_digest(data, 'sha256').hexdigest()}"


def _adapters(given: Any) -> Iterator[str]:  # noqa: ANN401 - SGLang's LoRARef, or their names and paths
    for one in given or ():
        path = getattr(one, "lora_path", one)
        found = _existing(str(path))
        yield files_digest(found) if found else str(path)
