"""Run a call of the library in a thread of its own, and wait for it with a deadline."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvdock_mooncake.master import ClusterError

T = TypeVar("T")


def run_within(
    deadline_s: float, work: Callable[[], T], discard: Callable[[T], object], what: str
) -> T:
    """Return what a call returns, or raise what it raises, by a deadline.

    A call that is late goes on in its thread, and its result is discarded.

    Args:
        deadline_s: Until when to wait, on `time.monotonic()`'s clock.
        work: The call.
        discard: What to do with a result that comes too late.
        what: What is waited for, for the message.

    Raises:
        ClusterError: If it is late.
    """
    lock = threading.Lock()
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]]
    answers = queue.SimpleQueue()
    late = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            answers.put((None, error))
            return
        with lock:
            if not late:
                answers.put((result, None))
                return
        discard(result)

    threading.Thread(target=run, name="kvdock-direct", daemon=True).start()
    left_s = min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX)
    try:
        result, error = answers.get(timeout=left_s)
    except queue.Empty:
        with lock:
            late = answers.empty()
        if late:
            raise ClusterError(
                f"{what} took longer than {left_s:.3g} s",
                fix="Look whether the peer's process runs and is reached from here.",
            ) from None
        result, error = answers.get()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there was no error
