"""Uses: which far pages were loaded before, so that the second use is noticed."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Uses:
    """Hashes of pages that were loaded from afar once.

    Args:
        limit: Most hashes; the oldest are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: dict[str, None] = {}
        self._lock = threading.Lock()

    def note(self, hashes: Sequence[str]) -> list[bool]:
        """Note a use of each page; return for which it was not the first."""
        with self._lock:
            again = [one in self._seen for one in hashes]
            for one in hashes:
                self._seen.pop(one, None)
                self._seen[one] = None
            while len(self._seen) > self._limit:
                del self._seen[next(iter(self._seen))]
        return again
