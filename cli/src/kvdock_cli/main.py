"""The `kvdock` command itself: wiring only."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from typing import Annotated

import typer

from kvdock.errors import KvdockError
from kvdock_cli import output
from kvdock_cli.progress import erase
from kvdock_cli.registry import CommandGroup
from kvdock_cli.typer_adapter import CONTEXT, Help, ParserError

_SIGNALLED = 128
"""Shells add the number of the signal that ended a process."""

COMPLETE = "_KVDOCK_COMPLETE"
"""Set by the script of `kvdock completion` to ask for completions."""

_LONGEST_END_S = 5.0
"""Time for threads and clients to end; one that hangs is reported before."""


def _finish(code: int | None, **_: object) -> None:
    """Make what a command returned the exit code."""
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="kvdock",
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_finish,
    no_args_is_help=True,
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def kvdock(
    context: typer.Context,
    *,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Name every part with version and path."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: JSON.")] = False,
    help: Help = False,  # noqa: A002 - the option's name
) -> None:
    """Storage for an LLM engine's KV cache, through plugins."""
    del help
    if version:
        from kvdock_cli.commands.version import versions  # noqa: PLC0415 - seldom asked for

        raise typer.Exit(versions(json=json))
    if context.invoked_subcommand is None:
        raise output.UsageProblem("no command was given", fix="See `kvdock --help`.")


def main(program: typer.Typer = app) -> None:
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
        erase()
        code = output.fail(output.Interrupted("interrupted"), as_json=as_json)
    if not isinstance(code, int):
        # What is not a status is said, as Python does.
        if sys.stderr:
            sys.stderr.write(f"{code}\n")
        code = output.PROBLEM
    _leave(code)


def _run(program: typer.Typer = app, *, as_json: bool) -> object:
    """Run the command that was given; return its exit code, or its last words."""
    if COMPLETE in os.environ:
        # A shell asks for words: typer's own switch would add two options.
        from typer.completion import completion_init  # type: ignore[attr-defined] # noqa: PLC0415 - see above

        completion_init()
    try:
        return program(prog_name=program.info.name, standalone_mode=False) or 0
    except KvdockError as error:
        return output.fail(error, as_json=as_json)
    except ParserError as error:
        return output.fail_usage(error, as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        return output.INTERRUPTED
    except SystemExit as done:
        return done.code or 0


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
