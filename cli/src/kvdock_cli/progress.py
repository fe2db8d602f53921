"""One line on a terminal that says how far a long command has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.testing import Progress

_ERASE = "\r\x1b[K"


@contextmanager
def shown() -> Iterator[Callable[[Progress], None] | None]:
    """Show progress on standard error while a block runs.

    Yields:
        What shows it; None where standard error is not a terminal.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield None
        return
    try:
        yield _show
    finally:
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


def _show(progress: Progress) -> None:
    sys.stderr.write(_ERASE + line(progress, get_terminal_size().columns - 1))
    sys.stderr.flush()


def line(progress: Progress, columns: int) -> str:
    """Spell progress within some columns."""
    if not progress.planned:
        return "collecting tests"[:columns]
    failed = f"{progress.failed} failed, " if progress.failed else ""
    current = progress.current.rpartition("::")[2]
    return f"{progress.ended}/{progress.planned} {failed}{current}"[:columns]
