"""Negative cache: keys known to be absent or corrupt, with a TTL.

Two lifetimes: a key that was absent may be stored by another host any moment;
one whose bytes were wrong stays wrong until it is deleted. Without this, a
prefix with a corrupt object costs every request that has it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray
    from kvdock.config.core import NegativeCacheSettings


class NegativeCache:
    """Keys believed to be missing, bounded, each with its own end."""

    def __init__(
        self,
        settings: NegativeCacheSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        # A plain dict takes ever longer to give up its oldest key.
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many keys are remembered, expired ones included."""
        return len(self._until)

    @property
    def keeps_absent(self) -> bool:
        """Return whether absent keys are remembered at all."""
        return bool(self._settings.max_keys and self._settings.absent_ttl)

    def lookup(self, keys: Sequence[str]) -> BoolArray | None:
        """Return which keys are believed missing, or None for none of them."""
        # Usually nothing is known: one pass in C, no lock.
        if not self._until or self._until.keys().isdisjoint(keys):
            return None
        now = self._clock()
        with self._lock:
            until = [self._until.get(key, 0.0) for key in keys]
            for key, end in zip(keys, until, strict=True):
                if end and end <= now:
                    self._until.pop(key, None)
        found = np.array(until) > now
        return found if found.any() else None

    def add_absent(self, keys: Iterable[str]) -> None:
        """Remember keys as absent for the short lifetime."""
        self._add(keys, self._settings.absent_ttl)

    def add_corrupt(self, keys: Iterable[str]) -> None:
        """Remember keys as corrupt for the long lifetime."""
        self._add(keys, self._settings.corrupt_ttl)

    def discard(self, keys: Iterable[str]) -> None:
        """Discard keys that were just stored."""
        if self._until:
            with self._lock:
                for key in keys:
                    self._until.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._until.clear()

    def _add(self, keys: Iterable[str], lifetime_s: float) -> None:
        bound = self._settings.max_keys
        if not bound or not lifetime_s:
            return
        end = self._clock() + lifetime_s
        with self._lock:
            for key in islice(keys, bound):
                # A corrupt key that is absent for a moment keeps the longer lifetime.
                self._until[key] = max(end, self._until.pop(key, 0.0))
            while len(self._until) > bound:
                self._until.popitem(last=False)
