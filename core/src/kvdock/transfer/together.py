"""Move the pools of one call on one thread: one hand-off, not one for each pool.

The calls of the pools run there as those of a background task do, see
`kvdock.resilience.background_executor`. The caller waits until the task has ended,
or until the deadline of a call has passed and another thread has settled it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING

import numpy as np

from kvdock.resilience.background_executor import BackgroundExecutor
from kvdock.resilience.executor import BackgroundThread

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray
    from kvdock.batch import Outcome


class _Turn:
    """The wait of a caller for its task."""

    __slots__ = ("_claim", "_over", "ended", "error", "rejected", "stopped")

    def __init__(self) -> None:
        self._claim = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self.ended = self.rejected = self.stopped = False
        self.error: Exception | None = None

    def __len__(self) -> int:
        """Return 0: what the task does has its outcomes elsewhere."""
        return 0

    def start(self) -> bool:
        """Begin to run; return False if the caller has given up before."""
        return self._claim.acquire(blocking=False)

    def finish(self, outcomes: OutcomeArray) -> None:  # noqa: ARG002 - it has none
        """End the caller's wait."""
        self.ended = True
        self._over.release()

    def reject(self, outcome: Outcome) -> None:  # noqa: ARG002 - the caller does it
        """Leave the work to the caller."""
        self.rejected = True

    def wait(self) -> None:
        """Wait until the task has ended, or its call is abandoned."""
        self._over.acquire()

    def cancel(self) -> None:
        """Let no further pool begin, and wait for the one under way.

        Its deadline bounds that. Then its pages are free, or leased to a late call:
        the caller may use them again.
        """
        self.stopped = True
        if self.start():
            return  # it never will
        while not self.ended:
            with suppress(BaseException):
                self._over.acquire()


class OneThread:
    """Runs the pools of a call on one background thread.

    Args:
        most: Calls at once; a further one runs on its caller's thread, and so does one
            for which no thread can be started.
    """

    def __init__(self, most: int) -> None:
        self._executor = BackgroundExecutor("kvdock-pools", most, 0)
        self.close = self._executor.close
        self.join = self._executor.join

    def run(self, names: list[str], move: Callable[[str], None]) -> None:
        """Move pools in turn, and remove from the list those that have been.

        If a call is abandoned, its pool is the first that is left.

        Args:
            names: The pools.
            move: Moves one of them, by the deadline of the call.
        """
        turn, context = _Turn(), copy_context()

        def work() -> OutcomeArray:
            try:
                context.run(_move_all, names, move, turn)
            except Exception as error:  # noqa: BLE001 - raised in the caller
                turn.error = error
            return np.zeros(0, np.uint8)

        # A task of the background runs its calls where it is.
        turn.rejected = isinstance(threading.current_thread(), BackgroundThread)
        try:
            if not turn.rejected:
                self._executor.submit(turn, work)
            if not turn.rejected:
                turn.wait()
        except BaseException:  # an interrupt
            turn.cancel()
            raise
        if turn.rejected:
            _move_all(names, move, turn)
        if turn.error is not None:
            raise turn.error


def _move_all(names: list[str], move: Callable[[str], None], turn: _Turn) -> None:
    while names and not turn.stopped:
        move(names[0])
        del names[0]
