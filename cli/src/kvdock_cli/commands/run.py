"""Start an engine with kvdock as its storage, or print what that takes.

Adapters say what a command lacks, as entry points `run.ENGINE` of `kvdock.commands`:
no engine is imported here, and none is known by its name.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock import Scope
from kvdock.config import with_configured
from kvdock.errors import KvdockError
from kvdock.launch import split_command
from kvdock.plugin import COMMANDS_GROUP, import_entry_point, usable_entry_points
from kvdock_cli import progress
from kvdock_cli.arguments import settings_of
from kvdock_cli.commands.list import load
from kvdock_cli.output import PROBLEM, UsageProblem, emit
from kvdock_cli.reports import doctor as diagnosis
from kvdock_cli.reports._report import Report
from kvdock_cli.terminal import style_of

if TYPE_CHECKING:
    from kvdock.launch import Launch
    from kvdock.plugin import Candidate


def run(command: tuple[str, ...], /, *, set_: tuple[str, ...] = ()) -> int:
    """Start an engine with kvdock as its storage.

    Write kvdock run -- vllm serve MODEL, with two dashes before the engine's command.
    It makes the checks of kvdock doctor, adds the flags and variables that a correct
    start needs, prints them, and becomes the engine. Without settings pages go to a
    directory in the user's cache. kvdock config ENGINE prints the flags instead.

    Args:
        command: The engine's command, such as vllm serve MODEL, behind two dashes.
        set_: A setting of the adapter or its backend, as KEY=VALUE; may be given
            several times.
    """
    candidate = adapter_of(command, engines())
    launch = _prepared(candidate, command, set_)
    said = diagnosis.report([(candidate, launch.findings)])
    sys.stderr.write(said.text(style_of(sys.stderr)) + "\n")
    if not said.ok:
        return PROBLEM
    sys.stderr.write(f"kvdock adds to the command:\n{added(launch)}\n")
    sys.stderr.flush()
    try:
        environ = os.environ | launch.variables
        os.execvpe(command[0], [*command, *launch.flags], environ)  # noqa: S606 - as the user gave it
    except OSError as error:
        raise UsageProblem(
            f"{command[0]} cannot be started: {error.strerror or error}"
        ) from error


def engines(prefix: str = "run.") -> dict[str, Candidate]:
    """Return what adapters offer under a prefix, by the engine's name."""
    return {
        candidate.name.removeprefix(prefix): candidate
        for candidate in usable_entry_points(COMMANDS_GROUP)
        if candidate.name.startswith(prefix)
    }


def adapter_of(command: Sequence[str], known: Mapping[str, Candidate]) -> Candidate:
    """Return the adapter of the engine that a command starts."""
    program = split_command(command)[0] if command else ""
    if program not in known:
        raise UsageProblem(
            f"no installed adapter knows {shlex.join(command[:3])!r}",
            fix=f"Engines of the adapters: {', '.join(known) or 'none'}.",
        )
    return known[program]


def flags_of(name: str) -> Callable[..., int]:
    """Return the command `kvdock config ENGINE`."""

    def flags(*, set_: tuple[str, ...] = (), json: bool = False) -> int:
        launch = _prepared(engines()[name], [name], set_)
        problems = [one for one in launch.findings if not one.ok]
        lines = [f"{one.what} {one.hint}".strip() for one in problems]
        data = {
            "engine": name,
            "flags": launch.flags,
            "variables": launch.variables,
            "findings": launch.findings,
        }
        done = Report(
            "kvdock.config-engine/1", data, lines or [added(launch)], not lines
        )
        return emit(done, as_json=json)

    flags.__doc__ = f"""Print the flags that start {name} with kvdock as its storage.

    Args:
        set_: A setting of the adapter or its backend, as KEY=VALUE; may be given
            several times.
        json: Print one line of JSON.
    """
    return flags


def added(launch: Launch) -> str:
    """Spell what is added, for a shell."""
    variables = [f"{key}={shlex.quote(text)}" for key, text in launch.variables.items()]
    lines: list[str] = []
    for word in launch.flags:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "\n".join([*variables, *lines])


def _prepared(
    candidate: Candidate, command: Sequence[str], set_: tuple[str, ...]
) -> Launch:
    launch: Any = import_entry_point(candidate)
    with progress.shown("examining"):
        done: Launch = launch(command, storage_settings(settings_of(set_)))
    return done


def storage_settings(given: Mapping[str, str]) -> dict[str, object]:
    """Return settings that name a backend: one that is configured, or a default.

    The default is the first that keeps pages in a directory beyond its process.
    """
    settings = with_configured(given)
    if {"plugin", "config", "tiers"} & settings.keys():
        return settings
    found = sorted(load().plugins, key=lambda one: one.manifest.name)
    for plugin in found:
        manifest = plugin.manifest
        if manifest.path_setting and manifest.durability >= Scope.HOST:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            root = str(Path(cache, "kvdock"))
            return {"plugin": manifest.name, manifest.path_setting: root, **settings}
    raise KvdockError(
        "no backend is installed that keeps pages in a directory",
        fix="Install one, for example with: pip install kvdock-file",
    )
