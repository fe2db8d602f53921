"""Calls on threads that nobody waits for, and the end of the process.

A process that ends while a call of the library runs is aborted. Who detaches
waits for the calls of engines; those that go on after it are waited for here.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

_PATIENCE_S = 40.0
"""The library waits for a frozen standalone client for 30 s, whatever it is told."""


@attrs.define(eq=False)
class BackgroundCalls:
    """Calls that run behind the engine's back."""

    _calls: int = attrs.field(default=0, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Yield whether a call may still be made, and count it."""
        with self._changed:
            may = not self._ended
            self._calls += may
        try:
            yield may
        finally:
            with self._changed:
                self._calls -= may
                self._changed.notify_all()

    def end(self) -> None:
        """Let no more calls begin, and wait for those that run."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._calls, _PATIENCE_S)

    def forget(self) -> None:
        """Begin anew in a forked child: the threads in calls are its parent's."""
        self._calls, self._ended = 0, False
        self._changed = threading.Condition()


BACKGROUND_CALLS = BackgroundCalls()
"""Of this process."""

atexit.register(BACKGROUND_CALLS.end)
os.register_at_fork(after_in_child=BACKGROUND_CALLS.forget)
