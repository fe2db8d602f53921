# ruff: noqa: ANN401 - SGLang's own objects
"""LoRA adapters, known in page hashes by what they hold.

SGLang seeds the page hashes of a request with the caller's `extra_key` and its
adapter's id, joined without a mark between them. The id is a digest of name and path
for `--lora-paths`, so that a replaced file would find the pages of the old one, and a
random number for adapters loaded over HTTP, whose pages no later process finds. The
patches that call this module put a digest of the adapter's content in its place, and
lengths before both, so that no caller can name the pages of an adapter. The digest is
taken when the engine loads the adapter, and kept until that is loaded again.

Source: SGLang 0.5.23, `lora/lora_registry.py:LoRARef`, `lora/lora_manager.py`,
`managers/schedule_batch.py:Req`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.errors import KvdockError
from kvdock.identity import files_digest, files_state, locate_model
from kvdock_sglang.launch_arguments import LORA_ARGUMENTS, canonical_argument

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("kvdock.sglang")

LOAD = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"

_loaded: dict[str, str] = {}
"""The engine's id of an adapter to what stands for its content in this process. The
engine has one registry of adapters for a process as well."""


def identify_at_load(original: Callable[..., Any], manager: Any, lora_ref: Any) -> Any:
    """Take the digest of an adapter while the engine loads it."""
    place = locate_model(str(lora_ref.lora_path), file="adapter_config.json")
    before = _state(place)
    result = original(manager, lora_ref)
    # A file that changes meanwhile leaves open which content was loaded.
    known = before is not None and before == _state(place)
    _loaded[lora_ref.lora_id] = _identity(place) if known and place else _nothing()
    return result


def identify_request(
    original: Callable[..., Any], request: Any, *args: Any, **options: Any
) -> None:
    """Put the content of a request's adapter into its page hashes.

    Its extra key becomes the caller's key and what stands for the adapter, each behind
    its length, so that no caller can spell another one. A request with neither keeps
    its hashes, by which routers look for it.
    """
    original(request, *args, **options)
    adapter = request.lora_id or ""
    key = (request.extra_key or "").removesuffix(adapter)
    if key or adapter:
        identity = _loaded.get(adapter, adapter)
        request.extra_key = f"{len(key)}:{key}{len(identity)}:{identity}"


def callers_key(extra_key: str) -> str:
    """Return the caller's part of an extra key, without what stands for an adapter."""
    length, colon, rest = extra_key.partition(":")
    return rest[: int(length)] if colon and length.isdecimal() else extra_key


def _state(place: Path | None) -> object:
    try:
        return files_state(place) if place else None
    except (KvdockError, OSError):
        return None


def _identity(place: Path) -> str:
    """Return what stands for an adapter, and for how the engine applies it."""
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - the engine

    try:
        resolved = get_server_args().resolved_dict()
        applied = {
            name: canonical_argument(name, _sorted(resolved[name]))
            for name in LORA_ARGUMENTS
            if name in resolved and name not in _CAPACITY
        }
        content = [files_digest(place), applied]
    except Exception as error:  # noqa: BLE001 - loading an adapter must not fail for it
        log.warning("pages of the adapter in %s are not shared: %s", place, error)
        return _nothing()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sorted(value: object) -> object:
    return sorted(value) if isinstance(value, set | frozenset) else value


_CAPACITY = frozenset(
    {
        "lora_paths",
        "enable_lora",
        "enable_lora_overlap_loading",
        "max_lora_rank",
        "max_loaded_loras",
        "max_loras_per_batch",
        "max_lora_chunk_size",
        "lora_eviction_policy",
        "lora_drain_wait_threshold",
    }
)
"""Arguments that say how many adapters there is space for, and not what they do.

Source: SGLang 0.5.23, `lora/mem_pool.py`, `lora/lora_drainer.py`.
"""


def _nothing() -> str:
    """Return an identity that nothing else has: its pages are never found again."""
    return f"unknown-{uuid.uuid4().hex}"
