"""Bound the pieces of memory under way, over all threads of a client."""

from __future__ import annotations

import threading
import time

import attrs


@attrs.define(eq=False)
class InFlightLimit:
    """So many pieces of memory may be under way at once.

    More than some 1024 of them outstanding to one TCP peer made 0.3.13 block
    for 60 s and left the store unusable for ever.

    Args:
        most: Pieces at once; a single call that has more goes alone.
    """

    most: int
    _taken: int = attrs.field(default=0, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)

    def enter(self, pieces: int, until_s: float) -> bool:
        """Wait for room; return whether it came in time, to be ended with `leave`.

        `until_s` is on `time.monotonic()`'s clock.
        """
        with self._changed:
            granted = not self._taken or self._taken + pieces <= self.most
            if not granted:
                patience = until_s - time.monotonic()
                granted = self._changed.wait_for(
                    lambda: not self._taken or self._taken + pieces <= self.most,
                    min(max(0.0, patience), threading.TIMEOUT_MAX),
                )
            if granted:
                self._taken += pieces
            return granted

    def leave(self, pieces: int) -> None:
        """Give room back."""
        with self._changed:
            self._taken -= pieces
            self._changed.notify_all()
