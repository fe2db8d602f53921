"""Find plugins, load each by itself, and name what is wrong with the broken.

kvdock has a loader of its own because pluggy's stops at the first entry point
that fails, without naming it, and drops a second one of the same name.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from typing import Any

import attrs
import pluggy

from kvdock import hookspecs
from kvdock.errors import PluginError, nearest
from kvdock.manifest import API_VERSION, Manifest

GROUP = "kvdock.backends"
ALLOW_VARIABLE = "KVDOCK_PLUGINS"


class Stage(StrEnum):
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
    """Why one plugin cannot be used, and what to do about it."""

    name: str
    distribution: str
    version: str
    entry_point: str
    stage: Stage
    cause: str
    fix: str

    def __str__(self) -> str:
        """Render as one line."""
        return (
            f"plugin {self.name!r} ({self.distribution} {self.version}, "
            f"{self.entry_point}) failed at stage {self.stage}: {self.cause}. "
            f"{self.fix}"
        )


@attrs.frozen(kw_only=True)
class Candidate:
    """An entry point and where it comes from."""

    name: str
    value: str
    distribution: str
    version: str

    def problem(self, stage: Stage, cause: str, fix: str) -> PluginProblem:
        """Describe a failure of this candidate."""
        return PluginProblem(
            name=self.name,
            distribution=self.distribution,
            version=self.version,
            entry_point=self.value,
            stage=stage,
            cause=cause.rstrip("."),
            fix=fix,
        )


@attrs.frozen(kw_only=True, eq=False)
class LoadedPlugin:
    """A plugin that passed every stage."""

    candidate: Candidate
    manifest: Manifest
    path: str
    hooks: pluggy.HookRelay = attrs.field(repr=False)
    implemented: frozenset[str]


class _Failure(Exception):  # noqa: N818 - leaves a stage, never this module
    """Leaves a stage with cause and fix; never leaves this module."""

    def __init__(self, stage: Stage, cause: str, fix: str) -> None:
        super().__init__(stage, cause, fix)
        self.stage, self.cause, self.fix = stage, cause, fix


def installed(group: str = GROUP) -> tuple[Candidate, ...]:
    """Return the entry points of a group, sorted by name.

    Reads package metadata only and imports nothing.
    """
    found = {
        Candidate(
            name=point.name,
            value=point.value,
            distribution=point.dist.name if point.dist else "?",
            version=point.dist.version if point.dist else "?",
        )
        for point in metadata.entry_points(group=group)
    }
    return tuple(sorted(found, key=lambda one: (one.name, one.distribution)))


def allowed(environ: Mapping[str, str] = os.environ) -> frozenset[str] | None:
    """Return the names that KVDOCK_PLUGINS allows, or None for all."""
    value = environ.get(ALLOW_VARIABLE)
    if value is None:
        return None
    return frozenset(filter(None, (name.strip() for name in value.split(","))))


def load_all(
    candidates: Sequence[Candidate],
) -> tuple[dict[str, LoadedPlugin], tuple[PluginProblem, ...]]:
    """Load candidates one by one; a broken one never stops the others.

    Returns:
        The plugins that passed, by name, and a problem for each that did not.
    """
    plugins: dict[str, LoadedPlugin] = {}
    problems: list[PluginProblem] = []
    names = [candidate.name for candidate in candidates]
    for candidate in candidates:
        if names.count(candidate.name) > 1:
            rivals = [one for one in candidates if one.name == candidate.name]
            owners = " and ".join(f"{one.distribution} ({one.value})" for one in rivals)
            problems.append(
                candidate.problem(
                    Stage.DISCOVER,
                    f"the name is claimed by {owners}",
                    "Uninstall all but one of them; until then none is used.",
                )
            )
            continue
        try:
            plugins[candidate.name] = _load(candidate)
        except _Failure as failure:
            problems.append(
                candidate.problem(failure.stage, failure.cause, failure.fix)
            )
    return plugins, tuple(problems)


def _load(candidate: Candidate) -> LoadedPlugin:
    plugin = _imported(candidate)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    own = _own_hooks(manager, plugin)
    manifest = _manifest(candidate, plugin, own)
    _validate(manager, plugin, candidate, own)
    return LoadedPlugin(
        candidate=candidate,
        manifest=manifest,
        path=_path(plugin),
        hooks=manager.hook,
        implemented=frozenset(own),
    )


def _imported(candidate: Candidate) -> object:
    module_name, _, attributes = candidate.value.partition(":")
    try:
        found: Any = importlib.import_module(module_name.strip())
        for attribute in filter(None, attributes.strip().split(".")):
            found = getattr(found, attribute)
    except Exception as error:
        raise _Failure(
            Stage.IMPORT,
            f"{type(error).__name__}: {error}",
            f"Reinstall {candidate.distribution}, or install what it needs.",
        ) from error
    if inspect.isclass(found):
        raise _Failure(
            Stage.IMPORT,
            f"{candidate.value} is a class",
            "Point the entry point at a module or at an instance.",
        )
    return found


def _own_hooks(manager: pluggy.PluginManager, plugin: object) -> tuple[str, ...]:
    return tuple(
        name
        for name in dir(plugin)
        if manager.parse_hookimpl_opts(plugin, name) is not None
    )


def _manifest(candidate: Candidate, plugin: object, own: Iterable[str]) -> Manifest:
    if "kvdock_manifest" not in own:
        raise _Failure(
            Stage.MANIFEST,
            "it has no manifest",
            "Add a function kvdock_manifest() marked with @hookimpl.",
        )
    try:
        found = plugin.kvdock_manifest()  # type: ignore[attr-defined]
    except Exception as error:
        raise _Failure(
            Stage.MANIFEST,
            f"its manifest raised {type(error).__name__}: {error}",
            f"It may be written for another kvdock; upgrade {candidate.distribution}.",
        ) from error
    # The number first: a manifest of another contract need not be our class.
    number = getattr(found, "api", None)
    if number != API_VERSION:
        newer = isinstance(number, int) and number > API_VERSION
        upgrade = "kvdock" if newer else candidate.distribution
        raise _Failure(
            Stage.MANIFEST,
            f"it is written for API {number!r}, this kvdock speaks {API_VERSION}",
            f"Upgrade {upgrade}.",
        )
    if not isinstance(found, Manifest):
        raise _Failure(
            Stage.MANIFEST,
            f"its manifest is a {type(found).__name__}",
            "Return a kvdock.Manifest.",
        )
    if found.name != candidate.name:
        raise _Failure(
            Stage.MANIFEST,
            f"its manifest says {found.name!r}, its entry point {candidate.name!r}",
            "Give both the same name.",
        )
    return found


def _validate(
    manager: pluggy.PluginManager,
    plugin: object,
    candidate: Candidate,
    own: Iterable[str],
) -> None:
    known = {name for name in dir(manager.hook) if name.startswith("kvdock_")}
    for name in own:
        if name not in known:
            raise _Failure(
                Stage.VALIDATE,
                f"there is no hook {name!r}",
                nearest(name, known) or f"Hooks are {', '.join(sorted(known))}.",
            )
    for name in sorted(known - set(own)):
        if name in hookspecs.REQUIRED:
            unmarked = callable(getattr(plugin, name, None))
            raise _Failure(
                Stage.VALIDATE,
                f"the required hook {name!r} is "
                + ("not marked" if unmarked else "missing"),
                "Mark it with @hookimpl." if unmarked else "Add it.",
            )
    try:
        manager.register(plugin, name=candidate.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _Failure(
            Stage.VALIDATE,
            " ".join(str(error).split()),
            "Use the arguments of the hook's specification, or fewer.",
        ) from error
    for name in own:
        defaults = [
            parameter.name
            for parameter in inspect.signature(
                getattr(plugin, name)
            ).parameters.values()
            if parameter.default is not inspect.Parameter.empty
        ]
        if defaults:
            # pluggy takes an argument with a default for one to leave out.
            raise _Failure(
                Stage.VALIDATE,
                f"hook {name!r} gives {', '.join(defaults)} a default, "
                "so it would never be passed",
                "Remove the default.",
            )


def _path(plugin: object) -> str:
    module = inspect.getmodule(plugin) or inspect.getmodule(type(plugin))
    return getattr(module, "__file__", None) or "?"


def require(
    names: Iterable[str],
    plugins: Mapping[str, LoadedPlugin],
    problems: Sequence[PluginProblem],
) -> None:
    """Raise for the first name that was asked for and cannot be used.

    Raises:
        PluginError: With the plugin's problem, or with what is installed.
    """
    for name in names:
        if name in plugins:
            continue
        for problem in problems:
            if problem.name == name:
                raise PluginError(str(problem))
        raise PluginError(
            f"no backend {name!r} is installed",
            fix=nearest(name, plugins)
            or f"Installed: {', '.join(sorted(plugins)) or 'none'}. "
            f"Try: pip install kvdock-{name}",
        )


def kept(
    candidates: Iterable[Candidate], names: frozenset[str] | None
) -> Iterator[Candidate]:
    """Yield the candidates that an allow-list lets through."""
    for candidate in candidates:
        if names is None or candidate.name in names:
            yield candidate
