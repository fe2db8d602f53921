"""Find plugins, choose those that may be used, and import each by itself.

Nothing here knows what a plugin has to be; see `kvdock.plugin.loading`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import attrs

from kvdock.errors import PluginError, did_you_mean
from kvdock.plugin.installed import EntryPoint, read_entry_points

BACKENDS_GROUP = "kvdock.backends"
ORACLES = "kvdock.oracles"
"""Entry points: a backend's name, and a function of its settings to an oracle."""
OBSERVERS_GROUP = "kvdock.observers"
STORES_GROUP = "kvdock.stores"
COMMANDS_GROUP = "kvdock.commands"
DOCTORS_GROUP = "kvdock.doctors"
GROUPS = (
    BACKENDS_GROUP,
    OBSERVERS_GROUP,
    STORES_GROUP,
    COMMANDS_GROUP,
    DOCTORS_GROUP,
)
"""The groups of plugins. An oracle goes with its backend."""

ALLOW_VARIABLE = "KVDOCK_PLUGINS"
DENY_VARIABLE = "KVDOCK_DENY"

OWN_DISTRIBUTIONS = ("kvdock", "kvdock-cli")
"""What is no plugin: the core's observers, and the commands of the command line."""


class LoadStage(StrEnum):
    """How far a plugin came before it failed."""

    DISCOVER = "discover"
    """Reading entry points: two distributions claim one name."""
    IMPORT = "import"
    """Importing what the entry point names."""
    MANIFEST = "manifest"
    """Asking for the manifest and reading it."""
    VALIDATE = "validate"
    """Comparing hooks with their specifications."""


@attrs.frozen(kw_only=True)
class PluginProblem:
    """The reason why a plugin cannot be used, and what to do about it."""

    name: str
    group: str = BACKENDS_GROUP
    distribution: str = "?"
    version: str = "?"
    entry_point: str = "?"
    stage: LoadStage
    cause: str
    fix: str

    def __str__(self) -> str:
        """Render as one line."""
        what = self.group.rpartition(".")[2].removesuffix("s")
        return (
            f"{what} {self.name!r} ({self.distribution} {self.version}, "
            f"{self.entry_point}) failed at stage {self.stage}: {self.cause}. "
            f"{self.fix}"
        )


class BrokenPlugin(PluginError):  # noqa: N818 - a plugin's state, like NoRoute
    """A plugin was asked for and is broken; `problem` says how."""

    def __init__(self, problem: PluginProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@attrs.frozen(kw_only=True)
class Candidate:
    """An entry point and where it comes from.

    Args:
        value: What it points at.
        distribution: Which distribution announces it.
        oracle: The oracle of a backend, as the entry point in `ORACLES` that
            its own distribution announces under the same name; "" for none.
        summary: What its distribution says about itself; may be "".
    """

    name: str
    value: str
    distribution: str
    version: str
    group: str = BACKENDS_GROUP
    oracle: str = ""
    summary: str = ""

    def problem(self, stage: LoadStage, cause: str, fix: str) -> PluginProblem:
        """Describe a failure of this candidate."""
        return PluginProblem(
            name=self.name,
            group=self.group,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.value,
            stage=stage,
            cause=cause.rstrip("."),
            fix=fix,
        )


def list_entry_points(*groups: str) -> tuple[Candidate, ...]:
    """Return the entry points of groups, by default of backends, sorted by name.

    Reads package metadata only and imports nothing.
    """
    points = tuple(read_entry_points("kvdock."))
    oracles = _oracles(points)
    found = {
        Candidate(
            name=point.name,
            value=point.value,
            distribution=point.distribution,
            version=point.version,
            group=point.group,
            oracle=oracles.get((point.group, point.name, point.distribution), ""),
            summary=point.summary,
        )
        for point in points
        if point.group in (groups or (BACKENDS_GROUP,))
    }
    return tuple(sorted(found, key=lambda one: (one.name, one.distribution)))


def _oracles(points: Iterable[EntryPoint]) -> dict[tuple[str, str, str], str]:
    """Return the oracles of backends, by their group, name and distribution."""
    # One of another distribution does not count: what the stored bytes look
    # like would then depend on whether a package of tests is installed.
    return {
        (BACKENDS_GROUP, point.name, point.distribution): point.value
        for point in points
        if point.group == ORACLES
    }


@attrs.frozen(kw_only=True)
class Selection:
    """The plugins that may be used, of every group.

    Args:
        allowed: Names of plugins and of distributions; None for all.
        denied: Those that may not be used although they are allowed.
    """

    allowed: frozenset[str] | None = None
    denied: frozenset[str] = frozenset()

    def admits(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be used."""
        if _is_among(candidate, self.denied):
            return False
        if self.allowed is None or candidate.distribution in OWN_DISTRIBUTIONS:
            return True
        return _is_among(candidate, self.allowed)

    def of(
        self, candidates: Iterable[Candidate]
    ) -> tuple[tuple[Candidate, ...], tuple[Candidate, ...]]:
        """Part candidates into those that may be used, and the others."""
        every = tuple(candidates)
        kept = tuple(one for one in every if self.admits(one))
        return kept, tuple(one for one in every if one not in kept)


def selection(environ: Mapping[str, str] | None = None) -> Selection:
    """Read KVDOCK_PLUGINS and KVDOCK_DENY."""
    environ = os.environ if environ is None else environ
    allowed = environ.get(ALLOW_VARIABLE)
    return Selection(
        allowed=None if allowed is None else _names(allowed),
        denied=_names(environ.get(DENY_VARIABLE, "")),
    )


def _is_among(candidate: Candidate, names: frozenset[str]) -> bool:
    """Return whether a candidate or its distribution is named, in any spelling."""
    owners = {_canonical(name) for name in names}
    return candidate.name in names or _canonical(candidate.distribution) in owners


def _names(value: str) -> frozenset[str]:
    """Read names with commas."""
    return frozenset(name.strip() for name in value.split(",") if name.strip())


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def usable_entry_points(
    group: str, environ: Mapping[str, str] | None = None
) -> tuple[Candidate, ...]:
    """Return the entry points of a group that may be used, sorted by name."""
    return selection(environ).of(list_entry_points(group))[0]


def missing_allowed(
    candidates: Iterable[Candidate], chosen: Selection
) -> tuple[PluginProblem, ...]:
    """Return a problem for each allowed name that no plugin of any group has."""
    known = {
        word for one in candidates for word in (one.name, _canonical(one.distribution))
    }
    lacking = set(chosen.allowed or ()) - known
    if lacking:
        every = list_entry_points(*GROUPS)
        lacking -= {one.name for one in every}
        owners = {_canonical(one.distribution) for one in every}
        lacking = {name for name in lacking if _canonical(name) not in owners}
    return tuple(
        PluginProblem(
            name=name,
            stage=LoadStage.DISCOVER,
            cause=f"{ALLOW_VARIABLE} names it, but it is not installed",
            fix=install_hint(name)
            or did_you_mean(name, known)
            or "Correct the name, or install the distribution that has it.",
        )
        for name in sorted(lacking)
    )


def install_hint(name: str) -> str:
    """Return how to install one of kvdock's own backends, or "".

    Any other name may be a typing error, or belong to a package of someone whom
    the user does not mean.
    """
    from importlib import resources  # noqa: PLC0415 - seldom asked for, 4 ms

    known = (resources.files(__package__) / "known_backends.txt").read_text().split()
    return f"Try: pip install kvdock-{name}" if name in known else ""


def split_duplicates(
    candidates: Sequence[Candidate],
) -> tuple[tuple[Candidate, ...], tuple[PluginProblem, ...]]:
    """Part the candidates that own their name from those that share it.

    Returns:
        The former, and a problem for each of the latter: which of them is
        meant is not for kvdock to guess.
    """
    problems = []
    alone = []
    for candidate in candidates:
        rivals = [one for one in candidates if one.name == candidate.name]
        if len(rivals) == 1:
            alone.append(candidate)
            continue
        owners = " and ".join(f"{one.distribution} ({one.value})" for one in rivals)
        problems.append(
            candidate.problem(
                LoadStage.DISCOVER,
                f"the name is claimed by {owners}",
                "Uninstall all but one of them; until then none is used.",
            )
        )
    return tuple(alone), tuple(problems)


def import_entry_point(candidate: Candidate) -> object:
    """Import what an entry point names.

    Raises:
        BrokenPlugin: If that fails, in whatever way.
    """
    module_name, _, attributes = candidate.value.partition(":")
    try:
        # Standard output is the command's, which may owe one object of JSON.
        with contextlib.redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name.strip())
            for attribute in filter(None, attributes.strip().split(".")):
                found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise  # the user's, or a signal that ends the command
    except BaseException as error:
        fix = f"Reinstall {candidate.distribution}, or install what it needs."
        if _names_nothing(error, module_name.strip()):
            fix = (
                f"There is no {candidate.value!r}: correct the entry point in the "
                f"pyproject.toml of {candidate.distribution}, and install that again, "
                "with `pip install -e` too."
            )
        cause = f"{type(error).__name__}: {error}"
        raise BrokenPlugin(candidate.problem(LoadStage.IMPORT, cause, fix)) from error
    return found


def _names_nothing(error: BaseException, module: str) -> bool:
    """Return whether what an entry point names itself is missing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{module}.".startswith(f"{error.name}.")
    return isinstance(error, AttributeError) and error.obj is sys.modules.get(module)


def require(
    names: Iterable[str],
    plugins: Collection[str],
    problems: Sequence[PluginProblem],
) -> None:
    """Raise for the first name that was asked for and cannot be used.

    Raises:
        PluginError: With what is installed; a `BrokenPlugin` where the
            plugin is there and has a problem.
    """
    for name in names:
        if name in plugins:
            continue
        for problem in problems:
            if problem.name == name:
                raise BrokenPlugin(problem)
        raise PluginError(
            f"no backend {name!r} is installed",
            fix=install_hint(name)
            or did_you_mean(name, plugins)
            or f"Installed: {', '.join(sorted(plugins)) or 'none'}. A backend is what "
            f"an entry point in the group {BACKENDS_GROUP} announces, once that is "
            "installed, with `pip install -e` too.",
        )
