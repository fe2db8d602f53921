"""A log that names the first failure of each kind, and later ones less often.

A store that is down fails a thousand calls a second. The first failure of a kind is
logged at once; a policy decides which of the later ones are, and such a line says
how many came in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvdock")

EVERY_S = 30.0
"""Seconds between two lines of one kind with `every_half_minute`."""

Policy = Callable[[int, float], bool]
"""(failures of this kind so far, this one included; seconds since its last line) to
whether this failure is logged."""


def every_half_minute(_: int, since_s: float) -> bool:
    """Log one line of a kind in 30 s."""
    return since_s >= EVERY_S


def at_powers_of_two(count: int, _: float) -> bool:
    """Log the 1st, 2nd, 4th, 8th ... failure, for states that last for days."""
    return count.bit_count() == 1


def describe_error(error: BaseException) -> str:
    """Return type and message of an error; computing the message may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the error's own code
        return type(error).__name__


class _Kind:
    """The failures of one kind."""

    def __init__(self) -> None:
        self.count = 0
        self.held = 0  # since the last line
        self.logged_s = float("-inf")


class ThrottledLog:
    """Warnings about failures, limited for each kind."""

    def __init__(
        self,
        logger: logging.Logger = log,
        policy: Policy = every_half_minute,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}

    def warning(
        self,
        kind: str,
        message: str | Callable[[], str],
        error: BaseException | None = None,
    ) -> None:
        """Log a failure, unless the policy holds it back.

        A callable message is called only if it is logged. The traceback of `error` is
        logged with the first failure of the kind.
        """
        now_s = self._clock()
        with self._lock:
            known = self._kinds.setdefault(kind, _Kind())
            known.count += 1
            if not self._policy(known.count, now_s - known.logged_s):
                known.held += 1
                return
            held, known.held, known.logged_s = known.held, 0, now_s
            first = known.count == 1
        what = message if isinstance(message, str) else message()
        more = f" ({held} more since the last line of this kind)" if held else ""
        self._logger.warning("%s%s", what, more, exc_info=error if first else None)
