"""One call with a deadline, outside of a backend's channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, cast

from kvdock.errors import KvdockError
from kvdock.resilience.executor import DeadlineExecutor

T = TypeVar("T")


class LateError(KvdockError):
    """A call did not end by its deadline."""


def run_within(
    deadline_s: float,
    work: Callable[[], T],
    what: str,
    discard: Callable[[T], object] = lambda _: None,
) -> T:
    """Return what a call returns, or raise what it raises, by a deadline.

    For setups and probes, whose library may never answer. A call that is late goes on
    on its thread, which does not keep the process alive. `discard` is called with a
    result that comes too late; the deadline is on `time.monotonic()`'s clock.

    Raises:
        LateError: If it is late.
    """
    begun_s = time.monotonic()
    executor = DeadlineExecutor("kvdock-within", at_once=1, overrun=1)

    def late(result: T | None) -> None:
        if result is not None:
            discard(result)

    try:
        found = executor.run(work, deadline_s, late)
    finally:
        executor.shutdown(begun_s, lambda: None)
    if found.abandoned:
        raise LateError(
            f"{what} took longer than {deadline_s - begun_s:.3g} s",
            fix="Look for what it waits for.",
        )
    if found.error is not None:
        raise found.error
    return cast("T", found.result)
