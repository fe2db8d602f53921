"""Images, videos and sounds that requests give a name.

vLLM hashes such an item, and every block from it on is named by that hash. A request
may bring a name (`uuid`) in its place, and nothing says which bytes it is the name of:
a client that spells the hash of another image has its pages found by all who send that.
In vLLM's own cache this ends with the engine; what is stored would stay. So a name
counts in the process that was given it, and is the hash of nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import wraps
from typing import Any

_PROCESS = secrets.token_hex(16)


def keep_names_apart(inputs: type[Any]) -> None:
    """Have names that requests give counted for this process alone.

    Args:
        inputs: vLLM's `ProcessorInputs`, whose `get_mm_hashes` is wrapped, once.
    """
    hashes = inputs.get_mm_hashes
    if hasattr(hashes, "of_kvdock"):
        return

    @wraps(hashes)
    def get_mm_hashes(self: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        own = {
            modality: [None if name is None else f"{_PROCESS}:{name}" for name in names]
            for modality, names in (self.mm_uuid_items or {}).items()
        }
        return hashes(replace(self, mm_uuid_items=own), *args, **options)

    get_mm_hashes.of_kvdock = True  # type: ignore[attr-defined]
    inputs.get_mm_hashes = get_mm_hashes
