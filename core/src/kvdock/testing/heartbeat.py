"""A thread of the engine that beats: for how long could it not run?"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

BEAT_S = 0.02


@attrs.define(eq=False)
class Beats:
    """For how long a thread could not run, each time that it wanted to.

    Attributes:
        most_s: The longest of these times.
    """

    most_s: float = 0.0
    _attaching: int = 0
    _since_s: float = 0.0

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Do not count what attaching takes: a library is loaded and started there."""
        self._attaching += 1
        try:
            yield
        finally:
            self._since_s = time.monotonic()
            self._attaching -= 1

    def add(self, last_s: float, now_s: float, waited_s: float) -> None:
        """Count the time between two beats, and what of it was waited elsewhere."""
        if not self._attaching:
            seconds = now_s - max(last_s, self._since_s) - waited_s
            self.most_s = max(self.most_s, seconds)


@contextmanager
def heartbeat() -> Iterator[Beats]:
    """Let a thread beat; yield the times for which it could not run.

    For so long another one held the interpreter's lock: what any thread of this process
    has waited for a processor does not count, since the holder may have waited as well.
    """
    beats = Beats()
    end = threading.Event()

    def beat() -> None:
        last, waited = time.monotonic(), waited_s()
        while not end.wait(BEAT_S):
            now, waited_now = time.monotonic(), waited_s()
            beats.add(last, now, max(0.0, waited_now - waited))
            last, waited = now, waited_now

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield beats
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
