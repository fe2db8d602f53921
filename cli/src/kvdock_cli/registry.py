"""Commands as entry points: found by name, imported when they are asked for.

The group is `kvdock.commands`; kvdock's own commands are in it as well, so the
path of a third party's command is always exercised. See docs/reference/commands.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvdock.errors import did_you_mean
from kvdock.plugin import (
    BrokenPlugin,
    LoadStage,
    import_entry_point,
    split_duplicates,
    usable_entry_points,
)
from kvdock_cli.output import UsageProblem
from kvdock_cli.typer_adapter import CONTEXT, adapted

if TYPE_CHECKING:
    from kvdock import PluginProblem
    from kvdock.plugin import Candidate

GROUP = "kvdock.commands"

_WHOLE = 10_000
"""Characters of a summary: no sentence has so many."""


class WholeSummaries(TyperGroup):
    """A group whose help shows the first sentence of each command uncut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own
        """Write the commands with their summaries, folded to the width."""
        commands = [
            (name, self.get_command(ctx, name)) for name in self.list_commands(ctx)
        ]
        rows = [
            (name, command.get_short_help_str(_WHOLE))
            for name, command in commands
            if command and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class CommandGroup(WholeSummaries):
    """The commands that are installed, each imported on its own."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**settings)
        alone, problems = split_duplicates(usable_entry_points(GROUP))
        self._candidates = {one.name: one for one in alone}
        self._problems = {one.name: one for one in problems}

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - typer's own
        """Return the names of all commands without importing any."""
        return sorted({*self._candidates, *self._problems})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - typer's own
        """Import one command; a broken one says why when it is run."""
        if cmd_name in self._problems:
            return _broken(self._problems[cmd_name])
        if cmd_name not in self._candidates:
            close = did_you_mean(cmd_name, self.list_commands(ctx))
            raise UsageProblem(
                f"unknown command {cmd_name!r}", fix=close or "See `kvdock --help`."
            )
        try:
            return load(self._candidates[cmd_name])
        except BrokenPlugin as broken:
            return _broken(broken.problem)


def load(candidate: Candidate) -> Any:  # noqa: ANN401 - a class that typer keeps private
    """Import a command and make it one of typer's; raise BrokenPlugin if it is none."""
    found = import_entry_point(candidate)
    module = sys.modules[candidate.value.partition(":")[0].strip()]
    try:
        return _made(candidate.name, found, inspect.getdoc(module) or "")
    except Exception as error:
        raise BrokenPlugin(
            candidate.problem(
                LoadStage.VALIDATE,
                f"it is not a command: {type(error).__name__}: {error}",
                "Name a function, a mapping of functions or a typer.Typer.",
            )
        ) from error


def problems(candidates: Iterable[Candidate]) -> tuple[PluginProblem, ...]:
    """Import commands and return what is wrong with any."""
    found = []
    for candidate in candidates:
        try:
            load(candidate)
        except BrokenPlugin as broken:
            found.append(broken.problem)
    return tuple(found)


def _made(name: str, found: object, about: str) -> Any:  # noqa: ANN401 - a class that typer keeps private
    """Build the command; `about` describes a mapping, which cannot itself."""
    if isinstance(found, typer.Typer):
        outer = typer.Typer(add_completion=False, rich_markup_mode=None)
        outer.add_typer(found, name=name)
        return get_command(outer).commands[name]  # type: ignore[attr-defined]
    inner = typer.Typer(add_completion=False, rich_markup_mode=None)
    if isinstance(found, Mapping):
        inner = typer.Typer(
            help=about,
            cls=WholeSummaries,
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            context_settings=CONTEXT,
        )
        for word, function in found.items():
            inner.command(word)(_function(function))
        return _made(name, inner, about)
    inner.command(name)(_function(found))
    return get_command(inner)


def _function(found: object) -> Any:  # noqa: ANN401 - any signature
    if not callable(found) or inspect.isclass(found):
        raise TypeError(f"{found!r} is not a function")
    return adapted(found)


def _broken(problem: PluginProblem) -> TyperCommand:
    """Return a command that only reports why it cannot run."""

    def fail() -> None:
        raise BrokenPlugin(problem)

    text = f"broken ({problem.distribution}): {problem.cause}. {problem.fix}"
    return TyperCommand(
        problem.name,
        callback=fail,
        help=text,
        short_help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        rich_markup_mode=None,
    )
