"""The `kvdock` command: how it begins and ends.

`kvdock --version` is answered here, before typer is imported.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from kvdock.errors import KvdockError
from kvdock_cli import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

_SIGNALLED = 128
"""Shells add the number of the signal that ended a process."""

_LONGEST_END_S = 5.0
"""Time for threads and clients to end; one that hangs is reported before."""


def main(program: typer.Typer | None = None) -> None:
    """Run a command line; the `kvdock` script calls this for its own."""
    for stream in (sys.stdout, sys.stderr):
        # A path may hold any bytes, and a terminal know but few letters.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    received: list[int] = []

    def terminate(number: int, _: object) -> None:
        """End as on Ctrl-C: temporary directories are removed on the way."""
        received.append(number)
        # An import that it meets passes this on, and no other exception.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    as_json = "--json" in sys.argv
    code = _run(program, as_json=as_json)
    if code == output.INTERRUPTED and received:
        code = _SIGNALLED + received[0]
    elif code == output.INTERRUPTED:
        from kvdock_cli.progress import erase  # noqa: PLC0415 - seldom needed

        erase()
        code = output.fail(output.Interrupted("interrupted"), as_json=as_json)
    if not isinstance(code, int):
        # What is not a status is said, as Python does.
        if sys.stderr:
            sys.stderr.write(f"{code}\n")
        code = output.PROBLEM
    _leave(code)


def _run(program: typer.Typer | None = None, *, as_json: bool) -> object:
    """Run the command that was given; return its exit code, or its last words."""
    try:
        if program is None and _is_version(sys.argv[1:]):
            from kvdock_cli.commands.version import versions  # noqa: PLC0415 - seldom asked for

            return versions(json=as_json)
        from kvdock_cli.program import app, run  # noqa: PLC0415 - typer takes 50 ms

        return run(program or app, as_json=as_json)
    except KvdockError as error:
        return output.fail(error, as_json=as_json)
    except BrokenPipeError:
        return output.PROBLEM
    except KeyboardInterrupt:
        return output.INTERRUPTED
    except SystemExit as done:
        return done.code or 0


def _is_version(arguments: Sequence[str]) -> bool:
    """Return whether the versions are asked for, and nothing else."""
    words = {*arguments} - {"--json"}
    return bool(words) and words <= {"--version", "-V"}


def _leave(code: int) -> None:
    """End the process, whatever a thread of some backend still waits for."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        # The reader is gone, or the disk is full; Python would complain of it once
        # more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = output.PROBLEM
    last = threading.Timer(_LONGEST_END_S, os._exit, (code,))
    last.daemon = True
    last.start()
    sys.exit(code)
