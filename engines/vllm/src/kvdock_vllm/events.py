"""vLLM's keys of pages, for events of what storage has."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

GROUP_BYTES = 4
"""How many bytes at the end of vLLM's keys are the number of the group."""


class StoredKeys:
    """Turns page hashes back into vLLM's keys; called on any thread.

    Args:
        names: Each group's pool name by the group's number.
        limit: Hashes of adapters' pages to remember; the oldest are forgotten first.
    """

    def __init__(self, names: Mapping[int, str], limit: int) -> None:
        self._groups = {
            name: number.to_bytes(GROUP_BYTES, "big") for number, name in names.items()
        }
        self._limit = limit
        self._plain: dict[str, str] = {}
        self._lock = threading.Lock()

    def note_adapter_hashes(self, hashes: Sequence[str], plain: Sequence[str]) -> None:
        """Remember which block hashes the pages of an adapter stand for."""
        with self._lock:
            self._plain.update(zip(hashes, plain, strict=True))
            while len(self._plain) > self._limit:
                del self._plain[next(iter(self._plain))]

    def keys(self, pool: str, hashes: Sequence[str]) -> list[bytes]:
        """Return vLLM's keys of pages of a pool."""
        group = self._groups[pool]
        with self._lock:
            return [bytes.fromhex(self._plain.get(one, one)) + group for one in hashes]
