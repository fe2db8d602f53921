"""Load each plugin by itself, and name what is wrong with the broken.

kvdock has a loader of its own because pluggy's stops at the first entry point
that fails, without naming it, and drops a second one of the same name.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs

from kvdock.plugin.discovery import (
    BrokenPlugin,
    Candidate,
    PluginProblem,
    import_entry_point,
    split_duplicates,
)
from kvdock.plugin.validation import (
    ContractViolation,
    ValidatedPlugin,
    validate_plugin,
)

if TYPE_CHECKING:
    import pluggy

T = TypeVar("T")


@attrs.frozen(kw_only=True, eq=False)
class LoadedPlugin(ValidatedPlugin):
    """A plugin that passed every stage.

    Args:
        instance_of: The plugin's name, where this is a named instance of it.
        wrapped_by: The wrappers around its stores, the innermost first.
        believed: Whether the integrity that it declares counts without a report.
    """

    candidate: Candidate
    path: str
    instance_of: str = ""
    wrapped_by: tuple[str, ...] = ()
    believed: bool = False

    @property
    def hooks(self) -> pluggy.HookRelay:
        """The plugin's hooks, with the observers around them."""
        return self.manager.hook


def load_all(
    candidates: Sequence[Candidate],
) -> tuple[dict[str, LoadedPlugin], tuple[PluginProblem, ...]]:
    """Load candidates one by one; a broken one never stops the others."""
    return load_each(candidates, load_one)


def load_each(
    candidates: Sequence[Candidate], load: Callable[[Candidate], T]
) -> tuple[dict[str, T], tuple[PluginProblem, ...]]:
    """Load candidates of any kind one by one; a broken one never stops the others."""
    found: dict[str, T] = {}
    alone, problems = split_duplicates(candidates)
    for candidate in alone:
        try:
            found[candidate.name] = load(candidate)
        except BrokenPlugin as broken:
            problems += (broken.problem,)
    return found, problems


def load_one(candidate: Candidate) -> LoadedPlugin:
    """Import one backend, and check what it declares; raise BrokenPlugin if unfit."""
    return accept(import_entry_point(candidate), candidate)


def accept(plugin: object, candidate: Candidate) -> LoadedPlugin:
    """Check what a plugin declares; raise BrokenPlugin if it is unfit."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            accepted = validate_plugin(plugin, candidate.name, candidate.distribution)
    except ContractViolation as breach:
        raise BrokenPlugin(
            candidate.problem(breach.stage, breach.cause, breach.fix)
        ) from breach
    own = attrs.asdict(accepted, recurse=False)
    return LoadedPlugin(candidate=candidate, path=path_of(plugin), **own)


def path_of(plugin: object) -> str:
    """Return the file that a plugin was loaded from, or "?"."""
    module = inspect.getmodule(plugin) or inspect.getmodule(type(plugin))
    return getattr(module, "__file__", None) or "?"
