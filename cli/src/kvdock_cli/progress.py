"""One line on a terminal that says how far a long command has come.

It is on standard error, as standard output belongs to the answer, and it is gone
when the work has ended, also where Ctrl-C ended it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import attrs

from kvdock_cli.terminal import ERASE, is_terminal

_FIRST_S = 0.5
"""Work that takes less shows nothing."""

_EVERY_S = 0.2
_ESTIMATE_S = 1.0
"""Before that the pace of the work is not known."""

_BAR = 20


@attrs.define(eq=False)
class Progress:
    """The progress of a piece of work.

    Args:
        total: How much there is to do; 0 where that is not known.
    """

    label: str
    total: int = 0
    unit: Callable[[int], str] = str
    done: int = 0
    note: str = ""
    began_s: float = attrs.field(factory=time.monotonic)
    _writing: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Leave the terminal to what a block prints."""
        with self._writing:
            erase()
            yield

    def draw(self) -> None:
        """Draw the line; the drawing thread calls this."""
        from shutil import get_terminal_size  # noqa: PLC0415 - as in `terminal`

        columns = get_terminal_size().columns - 1
        with self._writing:
            sys.stderr.write(ERASE + self.line(columns, time.monotonic()))
            sys.stderr.flush()

    def advance(self, amount: int = 1) -> None:
        """Count what was done since the last call; any thread may call it."""
        self.done += amount

    def line(self, columns: int, now_s: float) -> str:
        """Spell it within some columns."""
        passed_s = now_s - self.began_s
        parts = [self.label]
        if self.total:
            done = min(self.done, self.total)
            full = done * _BAR // self.total
            parts.append(f"[{'=' * full}{' ' * (_BAR - full)}]")
            parts.append(f"{self.unit(done)}/{self.unit(self.total)}")
            if done and passed_s >= _ESTIMATE_S:
                left_s = passed_s / done * (self.total - done)
                parts.append(f"{timedelta(seconds=round(left_s))} left")
        else:
            parts.append(str(timedelta(seconds=round(passed_s))))
        return "  ".join(filter(None, (*parts, self.note)))[: max(0, columns)]


@contextmanager
def shown(
    label: str, total: int = 0, unit: Callable[[int], str] = str
) -> Iterator[Progress]:
    """Show progress on standard error while a block runs.

    Yields:
        What the block updates; it is drawn only where standard error is a
        terminal, from another thread, and only once the work takes a moment.
    """
    progress = Progress(label, total, unit)
    if not is_terminal(sys.stderr):
        yield progress
        return
    ended = threading.Event()
    drawer = threading.Thread(
        target=_draw, args=(progress, ended), name="kvdock-progress", daemon=True
    )
    drawer.start()
    try:
        yield progress
    finally:
        ended.set()
        drawer.join()
        erase()


def erase() -> None:
    """Leave nothing of a line behind."""
    if is_terminal(sys.stderr):
        sys.stderr.write(ERASE)
        sys.stderr.flush()


def _draw(progress: Progress, ended: threading.Event) -> None:
    wait_s = _FIRST_S
    while not ended.wait(wait_s):
        progress.draw()
        wait_s = _EVERY_S
