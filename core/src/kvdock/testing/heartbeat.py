"""A thread of the engine that beats: for how long could it not run?"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_S = 0.02


@contextmanager
def heartbeat() -> Iterator[list[float]]:
    """Let a thread beat; yield the times for which it could not run.

    For so long another one held the interpreter's lock: what any thread of this process
    has waited for a processor does not count, since the holder may have waited as well.
    """
    gaps = [0.0]
    end = threading.Event()

    def beat() -> None:
        last, waited = time.monotonic(), waited_s()
        while not end.wait(BEAT_S):
            now, waited_now = time.monotonic(), waited_s()
            gaps.append(now - last - max(0.0, waited_now - waited))
            last, waited = now, waited_now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield gaps
    finally:
        end.set()
        thread.join()


def waited_s() -> float:
    """Return how long the threads of this process have waited for a processor."""
    waited_ns = 0
    with suppress(OSError, IndexError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9
