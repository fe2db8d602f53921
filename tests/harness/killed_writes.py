"""Kill a process before one of its writes to a store, and a place that is quick."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

WRITES = ("pwrite", "rename", "unlink")
"""All that changes a record or a name."""
_SHARED = Path("/dev/shm")  # noqa: S108 - no link is followed in it
MEMORY = _SHARED if _SHARED.is_dir() else None
"""Where a wait for a disk takes no time, if there is such a place."""


@contextmanager
def killed(before: int) -> Iterator[None]:
    """Kill this process before one of its writes, counted from 1."""
    left = [before]

    def dying(write: Any) -> Any:
        def call(*args: Any, **words: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args, **words)

        return call

    patches = [patch.object(os, name, dying(getattr(os, name))) for name in WRITES]
    for one in patches:
        one.start()
    yield
    for one in patches:
        one.stop()
