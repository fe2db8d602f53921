"""Which model an engine has loaded: the content of its files, not their place.

What the files say now is taken for what the engine read when it started. A file
that was changed since then would give the old weights a new identity, so it stops
the attachment.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdock.errors import KvdockError, NamespaceError
from kvdock.identity import (
    WeightsBy,
    files_digest,
    identity_files,
    locate_model,
    model_identity,
    texts_digest,
)

log = logging.getLogger("kvdock.sglang")

_IMPORTS_S = 2.0
"""A process imports for longer than this before it reads a model. A file system of
another host may have a clock of its own."""

_LOADED_AGAIN = (
    "Restart the engine, so that it has what the files say; or give the weights that "
    'it has another "revision".'
)


SAME_FILES = frozenset(
    {"auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
)
"""Load formats that read the same tensors of the same files, in another way.

Source: SGLang 0.5.23, `model_loader/loader.py:DefaultModelLoader._prepare_weights`.
"""

_COPIES = MappingProxyType({"npcache": "np", "presharded": "presharded"})
"""Load formats that keep a copy of the weights beside them, and read it from then on.

Source: SGLang 0.5.23, `model_loader/weight_utils.py:np_cache_weights_iterator`,
`model_loader/loader.py:PreshardedModelLoader`.
"""

_OWN_FILES = SAME_FILES | frozenset(
    [
        "pt",
        "npcache",
        "mistral",
        "dummy",
        "sharded_state",
        "presharded",
        "gguf",
        "bitsandbytes",
        "layered",
        "flash_rl",
    ]
)
"""Load formats that read nothing but a model's own files. Others take weights from a
server, from another process, or from a place that nothing here knows."""


def files_of_model(
    path: str,
    *,
    revision: str = "",
    commit: str = "",
    named: str = "",
    load_format: str = "auto",
    weights: WeightsBy = WeightsBy.HEADERS,
) -> str:
    """Return what stands for a model's files.

    The operator's own name for the weights, `named`, stands in place of reading them.

    Raises:
        KvdockError: If the files do not say which weights the engine has loaded.
    """
    if load_format not in _OWN_FILES and not named:
        raise KvdockError(
            f"load format {load_format!r} may take weights from elsewhere, so the "
            "files of the model do not say which they are",
            fix='Set "revision", and change it whenever the weights change.',
        )
    place = locate_model(path, revision=revision)
    if place is None:
        if named:
            return f"named:{named}"
        try:
            return model_identity(path, revision=revision, commit=commit)
        except NamespaceError:
            log.warning(
                "nothing says which weights %s has, so its name counts: set "
                '"revision", and change it whenever the weights change',
                path,
            )
            return f"name:{path} {revision}".rstrip()
    check_unchanged(place, weights_too=not named)
    if named:
        texts = texts_digest(place) if place.is_dir() else ""
        return f"named:{named} texts:{texts}"
    found = model_identity(str(place), revision=revision, weights=weights)
    copy = place / _COPIES.get(load_format, "")
    if copy == place or not copy.is_dir():
        return found
    for file in _files_below(copy):
        _check_before_start(file)
    return f"{found} copy:{tree_digest(copy, weights=weights)}"


def tree_digest(folder: Path, *, weights: WeightsBy = WeightsBy.HEADERS) -> str:
    """Return a digest of all files below a folder, in hex."""
    digest = hashlib.sha256()
    for file in _files_below(folder):
        if file.suffix == ".safetensors":
            content = files_digest(file, weights=weights)
        else:
            with file.open("rb") as data:
                content = hashlib.file_digest(data, "sha256").hexdigest()
        name = str(file.relative_to(folder))
        digest.update(f"{name}\0{content}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _files_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def check_unchanged(place: Path, *, weights_too: bool = True) -> None:
    """Reject files that were written after this process had started."""
    if place.resolve().parent.name == "snapshots":
        # The hub's cache: downloaded by this engine, and named by its commit.
        return
    for file in identity_files(place):
        if weights_too or file.suffix in (".json", ".py", ".jinja"):
            _check_before_start(file)


def _check_before_start(file: Path) -> None:
    late_s = file.stat().st_ctime - _started_s()
    if late_s > _IMPORTS_S:
        raise KvdockError(
            f"{file} was written {late_s:.0f} s after this engine had started, "
            "so it does not say what the engine has loaded",
            fix=_LOADED_AGAIN,
        )


def _started_s() -> float:
    """Return when this process began, in seconds of the wall clock."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return math.inf
    ticks = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
    return time.time() - age_s


def check_rope(config: Mapping[str, Any], context_tokens: int) -> None:
    """Reject a model whose keys depend on what else was in a batch.

    SGLang takes the long factors of LongRoPE for a whole batch as soon as one
    position in it is past the original context, so a key depends on other requests
    and on how a prompt is divided. Within the original context that never happens.

    Raises:
        KvdockError: If the model has LongRoPE and a context that reaches past it.

    Source: SGLang 0.5.23, `layers/rotary_embedding/rope_variant.py`:
    `Phi3LongRoPEScaledRotaryEmbedding.forward`.
    """
    for scaling, around in _ropes(config):
        original = scaling.get("original_max_position_embeddings") or around.get(
            "original_max_position_embeddings", 0
        )
        if context_tokens > int(original) + 1:
            raise KvdockError(
                "this model has LongRoPE, and SGLang chooses its factors for a whole "
                "batch: keys depend on other requests and on the chunks of a prompt, "
                "so no stored page is right for all",
                fix=f"Start it with --context-length {original}, where one set of "
                "factors is used, or without storage."
                if original
                else "Start it without storage.",
            )


def _ropes(
    config: Mapping[str, Any],
) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return each LongRoPE in a configuration, with what it lies in."""
    found: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for value in config.values():
        if isinstance(value, Mapping):
            kind = value.get("rope_type") or value.get("type")
            if kind == "longrope":
                found.append((value, config))
            found += _ropes(value)
    return found
