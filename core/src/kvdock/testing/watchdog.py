"""Calls that never return: found by their own limit, not by the run's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, cast

from kvdock.resilience.executor import DeadlineExecutor

T = TypeVar("T")

_MANY = 1 << 16
"""Calls at once, and calls that hang: the kit bounds neither."""

_END_S = 5.0
"""How long idle threads may take to end."""


class DidNotReturn(AssertionError):  # noqa: N818 - says what happened
    """A call of the plugin has not returned; its thread is abandoned."""


class Watchdog:
    """Runs calls on worker threads and stops waiting for those that hang.

    Engines call a plugin from several threads as well. A worker is used again,
    since plugins may keep something for each thread.
    """

    def __init__(self) -> None:
        self._executor = DeadlineExecutor("kvdock-kit", _MANY, _MANY)

    def run(self, call: Callable[[], T], limit_s: float, what: str) -> T:
        """Return what a call returns, or raise what it raises.

        Raises:
            DidNotReturn: If it has not returned by then.
        """
        if self._executor.guard.forked:
            # The threads of the parent do not run in a forked child.
            self._executor = DeadlineExecutor("kvdock-kit", _MANY, _MANY)
        found = self._executor.run(call, time.monotonic() + limit_s)
        if found.abandoned:
            raise DidNotReturn(f"{what} has not returned after {limit_s:.1f} s")
        if found.error is not None:
            raise found.error
        return cast("T", found.result)

    def close(self) -> None:
        """End the workers; one that hangs is left to itself."""
        wait_s = 0.0 if self._executor.abandoned else _END_S
        self._executor.shutdown(time.monotonic() + wait_s, lambda: None)
