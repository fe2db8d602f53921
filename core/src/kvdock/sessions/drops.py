"""Keys whose objects are being dropped because their bytes were wrong.

Nobody waits for that, and it may take seconds: some backends delete nothing
that was read lately. Until it is done a put would find the key there, store
nothing, call it a success, and lose the page when the deletion arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvdock.sessions.waits import seconds_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.hits import Bools


class Drops:
    """What one backend is about to forget."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._keys: set[str] = set()

    def __bool__(self) -> bool:
        """Whether anything is being dropped."""
        return bool(self._keys)

    def add(self, keys: Sequence[str]) -> list[str]:
        """Note keys; return those that nobody is dropping already."""
        with self._changed:
            fresh = [key for key in keys if key not in self._keys]
            self._keys.update(fresh)
        return fresh

    @contextmanager
    def until_done(self, keys: Sequence[str]) -> Iterator[None]:
        """Forget keys when the block is left: dropped, or given up."""
        try:
            yield
        finally:
            with self._changed:
                self._keys.difference_update(keys)
                self._changed.notify_all()

    def among(self, keys: Sequence[str]) -> Bools:
        """Return which of these are being dropped, bool (n,)."""
        with self._changed:
            return np.array([key in self._keys for key in keys], np.bool_)

    def wait(self, keys: Sequence[str], deadline_s: float) -> None:
        """Wait until none of these is being dropped, or until a deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._keys.isdisjoint(keys), seconds_until(deadline_s)
            )
