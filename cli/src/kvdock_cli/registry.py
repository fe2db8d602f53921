"""Commands as entry points: found by name, imported when they are run.

The help and a shell's completion say what metadata and sources say: importing all
commands takes half a second, and a stranger's may do anything.

The group is `kvdock.commands`; kvdock's own commands are in it as well, so the
path of a third party's command is always exercised. See docs/reference/commands.md.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from kvdock.errors import did_you_mean
from kvdock.plugin import (
    COMMANDS_GROUP,
    OWN_DISTRIBUTIONS,
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

_WHOLE = 10_000
"""Characters of a summary: no sentence has so many."""


_PANELS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("list", "doctor", "route", "config", "bench", "demo", "simulate"),
            "Inspect",
        ),
        **dict.fromkeys(("store", "keys"), "Store"),
        **dict.fromkeys(("run", "top", "why", "audit", "prefetch"), "Engine"),
        **dict.fromkeys(("new", "check"), "Write a plugin"),
    }
)
"""What commands are about; in the help all others stand behind these panels."""


class WholeSummaries(TyperGroup):
    """A group whose help shows the first sentence of each command uncut, in panels."""

    panels: Mapping[str, str] = MappingProxyType({})

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own
        """Write the commands with their summaries, folded to the width."""
        other = "Others" if self.panels else "Commands"
        panels: dict[str, list[tuple[str, str]]] = {
            title: [] for title in (*self.panels.values(), other)
        }
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command and not command.hidden:
                row = (name, command.get_short_help_str(_WHOLE))
                panels[self.panels.get(name, other)].append(row)
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class CommandGroup(WholeSummaries):
    """The commands that are installed; the one that runs is imported."""

    panels = _PANELS

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**settings)
        alone, problems = split_duplicates(usable_entry_points(COMMANDS_GROUP))
        # A name with a dot is of an adapter, for a command of ours.
        self._candidates = {one.name: one for one in alone if "." not in one.name}
        self._problems = {one.name: one for one in problems}

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - typer's own
        """Return the names of all commands without importing any."""
        return sorted({*self._candidates, *self._problems})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - typer's own
        """Return one command as help and completion list it, without importing it."""
        if cmd_name in self._problems:
            return _broken(self._problems[cmd_name])
        if cmd_name not in self._candidates:
            close = did_you_mean(cmd_name, self.list_commands(ctx))
            raise UsageProblem(
                f"unknown command {cmd_name!r}", fix=close or "See `kvdock --help`."
            )
        candidate = self._candidates[cmd_name]
        return TyperCommand(
            cmd_name, callback=None, help=_about(candidate), rich_markup_mode=None
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own
        """Import the command that is asked for; a broken one says why it is."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in self._candidates:
            try:
                command = load(self._candidates[name])
            except BrokenPlugin as broken:
                command = _broken(broken.problem)
        return name, command, rest


def _about(candidate: Candidate) -> str:
    """Return what a command is for, without importing it.

    One of ours says it in its source: in the docstring of its function or, where
    several make one command, of its module. Others are told from metadata.
    """
    module, _, attribute = candidate.value.partition(":")
    own = candidate.distribution in OWN_DISTRIBUTIONS
    spec: Any = importlib.util.find_spec(module) if own else None
    source = spec.loader.get_source(module) if spec else None
    if source is None:
        return candidate.summary or (
            f"A command of {candidate.distribution} {candidate.version}."
        )
    _, _, function = source.partition(f"\ndef {attribute}(")
    return inspect.cleandoc((function or source).split('"""', 2)[1])


def load(candidate: Candidate) -> Any:  # noqa: ANN401 - a class that typer keeps private
    """Import a command and make it one of typer's; raise BrokenPlugin if it is none."""
    found = import_entry_point(candidate)
    if "." in candidate.name:
        return found
    module = sys.modules[candidate.value.partition(":")[0].strip()]
    try:
        return _made(candidate.name, found, inspect.getdoc(module) or "")
    except Exception as error:
        raise BrokenPlugin(
            candidate.problem(
                LoadStage.VALIDATE,
                f"it is not a command: {type(error).__name__}: {error}",
                "Name a function, or a mapping of functions.",
            )
        ) from error


def loaded(
    candidates: Iterable[Candidate], load: Callable[[Candidate], Any]
) -> tuple[dict[Candidate, Any], tuple[PluginProblem, ...]]:
    """Load each; return what each is, and what is wrong with others."""
    found, problems = {}, []
    for candidate in candidates:
        try:
            found[candidate] = load(candidate)
        except BrokenPlugin as broken:
            problems.append(broken.problem)
    return found, tuple(problems)


def _made(name: str, found: Any, about: str) -> Any:  # noqa: ANN401 - a class that typer keeps private
    """Build the command; `about` describes a mapping, which cannot itself."""
    app = typer.Typer(
        help=about,
        cls=WholeSummaries,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    several = isinstance(found, Mapping)
    for word, function in found.items() if several else [(name, found)]:
        if not callable(function) or inspect.isclass(function):
            raise TypeError(f"{function!r} is not a function")
        app.command(word)(adapted(function))
    command: Any = get_group(app) if several else get_command(app)
    for one in command.commands.values() if several else [command]:
        for param in one.params:
            if param.type_descriptor.annotation is str:
                param._runtime_param = _Text()  # noqa: SLF001 - typer has no other way
    return command


class _Text:
    """How typer reads text, which is text already: its own way imports pydantic."""

    def coerce(self, value: object, **_: object) -> object:
        """Return what was given."""
        return value


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
