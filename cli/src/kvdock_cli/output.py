"""The output of commands: text for people, one line of JSON for programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvdock.errors import KvdockError, PluginError, SettingsError
from kvdock.plugin import BrokenPlugin
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import paragraph, plain
from kvdock_cli.terminal import style_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock_cli.reports._report import Report

FINE, PROBLEM, USAGE = 0, 1, 2
INTERRUPTED = 130
"""Ended by Ctrl-C, as shells count it: 128 and the signal's number."""

_PARSERS_WORDS = MappingProxyType(
    {
        r"Value error, ": "",
        r"Input should be a valid (number|integer).*": r"it is not \1",
        r"Input should be a valid string.*": "it is not text",
        r"is not number": "is not a number",
        r"is not integer": "is not a whole number",
        r"Got unexpected extra arguments?(\(s\))? \((.*)\)": r"unexpected argument: \2",
    }
)
"""Phrases of the command line parser, and of what it reads types with, as ours."""


class Unwritten(KvdockError):  # noqa: N818 - as the one below
    """Standard output takes no more."""


class Interrupted(KvdockError):  # noqa: N818 - as the one below
    """The user ended the command."""


class UsageProblem(KvdockError):  # noqa: N818 - it asks wrongly, nothing failed
    """The command was asked for something that makes no sense."""


def emit(report: Report, *, as_json: bool) -> int:
    """Print a report; return the exit code that its `ok` stands for."""
    say(_json(report.as_data()) if as_json else report.text(style_of()))
    return FINE if report.ok else PROBLEM


def _json(data: Mapping[str, object]) -> str:
    import json  # noqa: PLC0415 - most answers are text

    return json.dumps(data)


def fail(error: KvdockError, *, as_json: bool) -> int:
    """Print an error; return the exit code that it stands for."""
    if as_json:
        with suppress(Unwritten, BrokenPipeError):
            say(_json(error_data(error)))
    if sys.stderr:
        style = style_of(sys.stderr)
        head, *rest = paragraph(f"kvdock: {error}", style, hanging=2)
        head = head.replace("kvdock:", style.paint("kvdock:", Tone.BAD), 1)
        sys.stderr.write("\n".join([head, *rest, ""]))
    return exit_code(error)


def fail_usage(error: Any, *, as_json: bool) -> int:  # noqa: ANN401 - a class that typer keeps private
    """Print what the command line parser rejects, in the shape of any error."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "kvdock"
    what = error.format_message().strip()
    if context and what == context.get_help().strip():
        # No arguments where some are needed: the help is the answer.
        if as_json or not sys.stderr:
            problem = UsageProblem(
                "no command was given", fix=f"See `{command} --help`."
            )
            return fail(problem, as_json=as_json)
        sys.stderr.write(f"{what}\n")
        return USAGE
    for theirs, ours in _PARSERS_WORDS.items():
        what = re.sub(theirs, ours, what)
    what = what[:1].lower() + what[1:].rstrip(".")
    return fail(UsageProblem(what, fix=f"See `{command} --help`."), as_json=as_json)


def say(line: str) -> None:
    """Print a line, if standard output is open; raise Unwritten if it takes no more."""
    if not sys.stdout:
        return
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the user interrupted
    except OSError as error:
        raise Unwritten(
            f"the answer cannot be written: {error.strerror or error}"
        ) from error


def confirm(question: str, act: str, done: str, instead: str = "") -> None:
    """Ask on the terminal before something goes; anything but yes ends the command."""
    if not sys.stdin.isatty():
        raise UsageProblem(
            f"there is no terminal to ask whether to {act}",
            fix=instead or "Give --yes.",
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageProblem(f"nothing was {done}", fix="Answer yes, or give --yes.")


def write_file(file: Path, text: str) -> None:
    """Write what a command was asked to put into a file."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        what = f"{file} cannot be written: {error.strerror or error}"
        raise UsageProblem(what) from error


def exit_code(error: KvdockError) -> int:
    """Distinguish wrong usage from a problem that was found."""
    if isinstance(error, Interrupted):
        return INTERRUPTED
    wrong = isinstance(error, UsageProblem | SettingsError | PluginError)
    return USAGE if wrong and not isinstance(error, BrokenPlugin) else PROBLEM


def error_data(error: KvdockError) -> dict[str, object]:
    """Describe an error as data."""
    data: dict[str, object] = {
        "schema": "kvdock.error/1",
        "ok": False,
        "error": {
            "type": type(error).__name__,
            "what": error.what,
            "fix": error.fix,
        },
    }
    if isinstance(error, BrokenPlugin):
        data["problems"] = [plain(error.problem)]
    return data
