"""The terminal: how wide it is, and whether it shows colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from kvdock_cli.reports._style import PLAIN, Style

ERASE = "\r\x1b[K"
"""Moves to the start of the line and erases it."""

NARROWEST = 20


def style_of(
    stream: TextIO | None = None, environ: Mapping[str, str] | None = None
) -> Style:
    """Return how a report is to look on a stream.

    Colours are for terminals, and NO_COLOR switches them off; FORCE_COLOR is for
    pagers. Lines are folded on terminals alone: a pipe gets whole rows.
    """
    environ = os.environ if environ is None else environ
    stream = stream or sys.stdout
    terminal = is_terminal(stream)
    wanted = terminal or bool(environ.get("FORCE_COLOR"))
    colour = wanted and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    if not terminal:
        return Style(colour=True) if colour else PLAIN
    from shutil import get_terminal_size  # noqa: PLC0415 - what writes to no terminal has no use for it

    return Style(width=max(NARROWEST, get_terminal_size().columns), colour=colour)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; one that is closed is not."""
    try:
        return bool(stream) and bool(stream and stream.isatty())
    except ValueError:
        return False
