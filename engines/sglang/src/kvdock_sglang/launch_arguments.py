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
from typing import TYPE_CHECKING

from kvdock.identity import canonical_value, read_exemptions
from kvdock_sglang.model_files import SAME_FILES, tree_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPECULATIVE = ("speculative_", "_speculative_", "decrypted_draft_", "uno_", "spec_")
"""How names of launch arguments about a draft model begin."""

WITHOUT_DRAFT = frozenset({"", "NGRAM"})
"""Algorithms that propose tokens without a model, and so without pages."""

_DRAFT_APART = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK"})
"""Algorithms whose draft model has layers of its own: what the target computes for a
token does not depend on it. Under others everything counts for all pages.

Source: SGLang 0.5.23, `speculative/eagle_worker_v2.py`, `standalone_worker_v2.py`,
`dflash_worker_v2.py`.
"""

_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_LORA = read_exemptions(_LISTED["lora"])

EXEMPTIONS = (*read_exemptions(_LISTED["exempt"]), *_LORA)
"""Launch arguments that do not change the bytes of a page."""

TUNING_EXEMPTIONS = read_exemptions(_LISTED["tuning"])
"""Those that change no page besides, where the draft model has layers of its own."""

DRAFT_EXEMPTIONS = read_exemptions(_LISTED["draft"])
"""Those that change the draft model's pages alone, where it has layers of its own."""

LORA_ARGUMENTS = tuple(one.field for one in _LORA)
"""Launch arguments that change the pages of requests with an adapter alone."""


def identity_arguments(
    resolved: Mapping[str, object], *, draft: bool = False
) -> dict[str, object]:
    """Return what counts of SGLang's resolved launch arguments, as plain data.

    Args:
        resolved: All of them by name.
        draft: For the pages of a draft model, to which its own arguments count too.
    """
    exempt = {one.field for one in EXEMPTIONS}
    if str(resolved.get("speculative_algorithm") or "") in WITHOUT_DRAFT:
        exempt |= {name for name in resolved if is_speculative(name)}
    elif computes_drafts_apart(resolved):
        apart = TUNING_EXEMPTIONS if draft else (*TUNING_EXEMPTIONS, *DRAFT_EXEMPTIONS)
        exempt |= {one.field for one in apart}
    counted: dict[str, object] = {
        name: canonical_argument(name, value)
        for name, value in resolved.items()
        if name not in exempt
    }
    return {name: value for name, value in counted.items() if not _left_alone(value)}


def computes_drafts_apart(resolved: Mapping[str, object]) -> bool:
    """Return whether nothing of a draft model is in the target's pages."""
    algorithm = str(resolved.get("speculative_algorithm") or "")
    # With several draft layers each step has one, so their number matters.
    return algorithm in _DRAFT_APART and not resolved.get("enable_multi_layer_eagle")


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
        return "" if str(value) in SAME_FILES else str(value)
    if name == "speculative_attention_mode":
        # What a prompt is computed with anyway.
        return "" if value == "prefill" else value
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return _by_content(canonical_value(value, where=name))


def _by_content(value: object) -> object:
    """Put the content of what lies there in the place of each path."""
    if isinstance(value, dict):
        return {name: _by_content(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_by_content(one) for one in value]
    path = _existing(value) if isinstance(value, str) else None
    return _content(path) if path else value


def _existing(text: str) -> Path | None:
    # A plain word may be the name of a file in the working directory by chance.
    path = Path(text)
    try:
        return path if len(path.parts) > 1 and path.exists() else None
    except OSError:
        return None


def _content(path: Path) -> str:
    if path.is_dir():
        return f"files:{tree_digest(path)}"
    with path.open("rb") as data:
        return f"file:{hashlib.file_digest(data, 'sha256').hexdigest()}"
