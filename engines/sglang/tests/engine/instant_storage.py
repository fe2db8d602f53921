"""A storage class of SGLang's that returns at once: what no store can beat.

It keeps keys and no bytes. A page that is there is "loaded" by leaving the memory as it
is, so the answers are of no use; how fast they come is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class InstantStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Keys in a file of `extra_config["root"]`, which outlives the engine."""

    def __init__(self, storage_config: Any, *_: object) -> None:
        self._file = Path(storage_config.extra_config["root"])
        self._keys: set[str] = set()
        if self._file.exists():
            self._keys.update(self._file.read_text().split())

    def exists(self, key: str) -> bool:
        """Return whether a key was stored."""
        return key in self._keys

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ARG002 - SGLang's
        extra_info: Any = None,  # noqa: ARG002 - same
    ) -> list[bool]:
        """Load nothing; return which keys were stored."""
        return [key in self._keys for key in keys]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ARG002 - same
        extra_info: Any = None,  # noqa: ARG002 - same
    ) -> list[bool]:
        self._keys.update(keys)
        with self._file.open("a") as file:
            file.writelines(f"{key}\n" for key in keys)
        return [True] * len(keys)

    def get(self, key: str, *_: object) -> None:
        """Return no bytes: there are none."""

    def batch_get(self, keys: list[str], *_: object) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, *_: object) -> bool:
        return all(self.batch_set_v1([key], None))

    def batch_set(self, keys: list[str], *_: object) -> bool:
        return all(self.batch_set_v1(keys, None))
