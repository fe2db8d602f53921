"""Keys whose objects are being dropped because their bytes were wrong.

Nobody waits for that, and it may take seconds: some backends delete nothing
that was read lately. Until it is done a put would find the key there, store
nothing, call it a success, and lose the page when the deletion arrives.

A deletion that hangs is given up at its own deadline, and puts go ahead. If
it still happens later it takes what was stored meanwhile. That is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.synchronization import (lock_and_condition, seconds_until)

if TYPE_CHECKING:
    from kvdock.hits import Bools


@attrs.frozen(eq=False)
class Drop:
    """One deletion.

    Args:
        keys: What it takes away.
        give_up_s: When it is given up, on `time.monotonic()`'s clock.
    """

    keys: tuple[str, ...]
    give_up_s: float


class Drops:
    """What one backend is about to forget."""

    def __init__(self) -> None:
        self._lock, self._changed = lock_and_condition()
        self._by_key: dict[str, Drop] = {}
        self._running: list[Drop] = []

    def __bool__(self) -> bool:
        """Whether anything may be being dropped."""
        return bool(self._by_key)

    def begin(self, keys: Sequence[str], give_up_s: float) -> Drop | None:
        """Note a deletion of those keys that nobody is dropping already."""
        with self._lock:
            self._forget_late()
            fresh = tuple(key for key in keys if key not in self._by_key)
            if not fresh:
                return None
            drop = Drop(fresh, give_up_s)
            self._running.append(drop)
            self._by_key.update(dict.fromkeys(fresh, drop))
            return drop

    def end(self, drop: Drop) -> bool:
        """Note that a deletion has ended; return whether it was expected."""
        with self._lock:
            expected = drop in self._running
            if expected:
                self._running.remove(drop)
                self._forget(drop)
            return expected

    def overdue(self) -> list[Drop]:
        """Return the deletions that were given up since the last time."""
        now = time.monotonic()
        with self._lock:
            late = [drop for drop in self._running if drop.give_up_s <= now]
            self._running = [drop for drop in self._running if drop not in late]
            self._forget_late()
            return late

    def among(self, keys: Sequence[str]) -> Bools:
        """Return which of these are being dropped, bool (n,)."""
        with self._lock:
            self._forget_late()
            return np.array([key in self._by_key for key in keys], np.bool_)

    def wait(self, keys: Sequence[str], deadline_s: float) -> None:
        """Wait until none of these is being dropped, or until a deadline.

        Deletions that are given up meanwhile are not waited for any longer.
        """
        with self._lock:
            mine = {self._by_key[key] for key in keys if key in self._by_key}
            last_s = max((drop.give_up_s for drop in mine), default=deadline_s)
            self._changed.wait_for(
                lambda: self._by_key.keys().isdisjoint(keys),
                seconds_until(min(deadline_s, last_s)),
            )

    def _forget_late(self) -> None:
        now = time.monotonic()
        for drop in {one for one in self._by_key.values() if one.give_up_s <= now}:
            self._forget(drop)

    def _forget(self, drop: Drop) -> None:
        for key in drop.keys:
            # It may have been given up, and another one begun.
            if self._by_key.get(key) is drop:
                del self._by_key[key]
        self._changed.notify_all()
