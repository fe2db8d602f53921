"""Where results leave: text for people, one line of JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress

from kvdock.errors import KvdockError, PluginError, SettingsError
from kvdock.plugin import BrokenPlugin
from kvdock_cli.reports._tables import plain

FINE, PROBLEM, USAGE = 0, 1, 2


class Unwritten(KvdockError):  # noqa: N818 - as the one below
    """Standard output takes no more."""


class UsageProblem(KvdockError):  # noqa: N818 - it asks wrongly, nothing failed
    """The command was asked for something that makes no sense."""


def emit(text: str, data: Mapping[str, object], *, as_json: bool) -> int:
    """Print a report; return the exit code that its `ok` stands for."""
    say(json.dumps(data) if as_json else text)
    return FINE if data["ok"] else PROBLEM


def fail(error: KvdockError, *, as_json: bool) -> int:
    """Print an error; return the exit code that it stands for."""
    if as_json:
        with suppress(Unwritten, BrokenPipeError):
            say(json.dumps(error_data(error)))
    if sys.stderr:
        sys.stderr.write(f"kvdock: {error}\n")
    return exit_code(error)


def say(line: str) -> None:
    """Print a line; nothing where standard output is closed.

    Raises:
        Unwritten: If it takes no more.
    """
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


def exit_code(error: KvdockError) -> int:
    """Distinguish wrong usage from a problem that was found."""
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
