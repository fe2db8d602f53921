"""The command `kvdock doctor`: asks every plugin; the report formats the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvdock import Backend, Finding, Observer
from kvdock.config import explain, load_configuration, structure
from kvdock.errors import KvdockError, PluginError, SettingsError, did_you_mean
from kvdock.plugin import (
    BACKENDS_GROUP,
    COMMANDS_GROUP,
    OBSERVERS_GROUP,
    OWN_DISTRIBUTIONS,
    BrokenPlugin,
    Candidate,
    LoadedPlugin,
    LoadStage,
    PluginProblem,
    build_observers,
    import_entry_point,
    list_entry_points,
    require,
    split_duplicates,
    try_each,
    usable_entry_points,
)
from kvdock.self_test import ask_within, try_backend
from kvdock.stores import GROUP as STORES_GROUP
from kvdock_cli import progress, registry
from kvdock_cli.arguments import patience, settings_of, typed_settings
from kvdock_cli.commands.list import load
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports.doctor import Section, report
from kvdock_cli.reports.list import Listing

if TYPE_CHECKING:
    from kvdock.config import Configuration
    from kvdock_cli.reports._report import Report

GROUP = "kvdock.doctors"
_LATE = "Look for what it waits for, or raise --timeout."
_NO_QUOTAS = Finding(
    ok=True,
    warning=True,
    what="tenants have quotas, and it keeps none",
    hint="See `tenant_quotas` of other backends in `kvdock list NAME`.",
)


def doctor(
    name: str | None = None,
    /,
    *,
    set_: tuple[str, ...] = (),
    timeout: float = 10.0,
    no_self_test: bool = False,
    verbose: bool = False,
    json: bool = False,
) -> int:
    """Find out what is wrong: with plugins, with what they need, with commands.

    Backends are probed with the settings that an engine would read from the
    file and the environment. One that lacks some is skipped until it is named
    and they are given. One that is named and in order is then tried out: a page
    of each kind is stored, found, read back, compared and dropped, and nothing of
    it is left. A warning is for what works and deserves attention: the exit code
    is 0 then, and 1 where something is wrong.

    Args:
        name: One backend, or a section that another distribution adds.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        timeout: Seconds that each may take.
        no_self_test: Do not store a page to try a backend out.
        verbose: Show every step of a self test that passes.
        json: Print one line of JSON.
    """
    settings = settings_of(set_)
    if settings and name is None:
        raise UsageProblem(
            "settings are given, but no backend to give them to",
            fix="Write `kvdock doctor NAME --set KEY=VALUE`.",
        )
    with progress.shown("examining") as watch:
        done = diagnose(
            name,
            settings,
            timeout_s=patience(timeout),
            self_test=not no_self_test,
            verbose=verbose or json,
            watch=watch,
        )
    return emit(done, as_json=json)


def diagnose(
    name: str | None,
    settings: Mapping[str, str],
    *,
    timeout_s: float,
    self_test: bool = False,
    verbose: bool = True,
    watch: progress.Progress | None = None,
) -> Report:
    """Examine one name, or everything, and report it."""
    watch = watch or progress.Progress("examining")
    configured = load_configuration()
    fit, problems = _fit(name)
    loaded, unfit = Observer.load(fit[OBSERVERS_GROUP])
    observers = {
        one: loaded[one.name] for one in fit[OBSERVERS_GROUP] if one.name in loaded
    }
    _, wrong = registry.loaded(fit[COMMANDS_GROUP], registry.load)
    problems += (*wrong, *unfit)
    doctors, broken = registry.loaded(fit[GROUP], import_entry_point)
    problems += broken
    # `--set plugin=NAME` describes an instance, except to a section of an engine.
    instance = "plugin" in settings and name not in {one.name for one in doctors}
    given = {**configured.backends, **({name: settings} if name and instance else {})}
    backends = {*given, *(one.name for one in list_entry_points())}
    others = {one.name for some in fit.values() for one in some} | {
        one.name for one in problems
    }
    found = Listing(plugins=())
    if name in backends or name not in others:
        found = load(given, only=name or "")
    problems = (*found.problems, *problems)
    candidates = [*(one.candidate for one in found.plugins), *observers, *doctors]
    known = [one.name for one in candidates] + [one.name for one in problems]
    if name is not None and name not in known:
        raise UsageProblem(
            f"there is nothing called {name!r} to examine",
            fix=did_you_mean(name, known) or f"Known: {', '.join(sorted(set(known)))}.",
        )
    if settings:
        # What is named may be either.
        asked = {name: settings}
        configured = load_configuration({"backends": asked, "observers": asked})
    sections: list[Section] = []
    for one in found.plugins:
        if name in (None, one.manifest.name):
            watch.note = one.manifest.name
            mine = configured.backends.get(one.manifest.name, {})
            named = name is not None
            rows = _backend(
                one, mine, timeout_s, named=named, pages=self_test, verbose=verbose
            )
            rows = _for_settings(rows, one, configured, named=named)
            sections.append((one.candidate, rows))
    if name is None:
        problems += switched_on(configured)
        names = [one.manifest.name for one in found.plugins]
        problems += absent_tiers(configured, names, found.problems)
    sections += [
        (one, _settings_of(observer, configured.observers.get(one.name, {})))
        for one, observer in observers.items()
        if one.name == name or (name is None and one.name in configured.observers)
    ]
    for extra, ask in doctors.items():
        if name in (None, extra.name):
            watch.note = extra.name
            # What is no function fails when it is called, as a problem of its section.
            asking = partial(lambda call: call(settings), ask)
            sections.append((extra, ask_within(timeout_s, asking, _LATE)))
    return report(
        sections,
        [one for one in problems if name in (None, one.name)],
        found.hidden if name is None else (),
    )


def _for_settings(
    rows: Sequence[Finding],
    plugin: LoadedPlugin,
    configured: Configuration,
    *,
    named: bool,
) -> Sequence[Finding]:
    """Return what a probe has found, as it counts with these settings."""
    if named or _configured(plugin, configured):
        kept = plugin.manifest.tenant_quotas or not configured.core.tenants.rooms
        return rows if kept else [*rows, _NO_QUOTAS]
    return [
        row
        if row.ok
        else Finding(
            ok=True, skipped=True, what=f"not configured: {row.what}", hint=row.hint
        )
        for row in rows
    ]


def _configured(plugin: LoadedPlugin, configuration: Configuration) -> bool:
    """Return whether any setting of a backend comes from anywhere."""
    name, settings = plugin.manifest.name, plugin.manifest.settings
    if configuration.backends.get(name) or settings is None:
        return True
    # What remains are files and variables of others, such as a client library's. One
    # that many programs share, such as AWS_REGION, configures no backend by itself.
    nothing = attrs.evolve(
        configuration, backends={}, observers={}, tiers=(), origins={}
    )
    return any(
        row.origin not in ("default", "MISSING")
        and (name.upper() in row.origin or not row.origin.startswith("environment "))
        for row in explain(nothing, {f"backends.{name}": settings})
        if row.path.startswith(f"backends.{name}.")
    )


def _fit(
    name: str | None,
) -> tuple[dict[str, list[Candidate]], tuple[PluginProblem, ...]]:
    """Try what is installed besides backends, or what is named of it.

    Returns:
        What can be imported, by group, and what is wrong with the rest.
    """
    groups: dict[str, list[Candidate]] = {}
    problems: tuple[PluginProblem, ...] = ()
    for group in (OBSERVERS_GROUP, COMMANDS_GROUP, GROUP, STORES_GROUP):
        alone, doubled = split_duplicates(usable_entry_points(group))
        groups[group] = [one for one in alone if name in (None, one.name)]
        problems += doubled
    unfit = try_each(
        [
            one
            for some in groups.values()
            for one in some
            if one.distribution not in OWN_DISTRIBUTIONS
        ]
    )
    fit = {
        group: [one for one in some if one not in unfit]
        for group, some in groups.items()
    }
    return fit, (*problems, *unfit.values())


def _settings_of(observer: Observer, given: Mapping[str, object]) -> list[Finding]:
    """Look at an observer's settings; it is built only around a backend."""
    where = f"observer {observer.name!r}"
    try:
        structure(observer.settings, given, where=where)
    except SettingsError as error:
        return [Finding(ok=False, what=error.what, hint=error.fix)]
    return [Finding(ok=True, what="its settings are in order")]


def switched_on(configuration: Configuration) -> tuple[PluginProblem, ...]:
    """Return what keeps an engine with this configuration from its observers."""
    found = []
    for name in configuration.core.observers:
        given = configuration.observers.get(name, {})
        try:
            build_observers([name], {name: given} if given else {})
        except BrokenPlugin as broken:
            found.append(broken.problem)
        except KvdockError as error:
            found.append(_missing(OBSERVERS_GROUP, name, "core.observers", error))
    return tuple(found)


def absent_tiers(
    configuration: Configuration,
    names: Sequence[str],
    problems: Sequence[PluginProblem],
) -> tuple[PluginProblem, ...]:
    """Return a problem for each tier that names what is not a backend.

    `names` are those of backends; others that are installed have `problems`.
    """
    found = []
    for tier in configuration.tiers:
        try:
            require([tier.backend], names, problems)
        except BrokenPlugin:
            continue  # among the problems as well
        except PluginError as error:
            found.append(_missing(BACKENDS_GROUP, tier.backend, "tiers", error))
    return tuple(found)


def _missing(group: str, name: str, where: str, error: KvdockError) -> PluginProblem:
    """Return the problem that a setting names what is not installed."""
    candidate = Candidate(
        name=name, value="?", distribution="?", version="?", group=group
    )
    return candidate.problem(
        LoadStage.DISCOVER,
        f"{where} names it, and {error.what}",
        error.fix or f"Correct {where}.",
    )


def _backend(
    plugin: LoadedPlugin,
    settings: Mapping[str, object],
    timeout_s: float,
    *,
    named: bool,
    pages: bool,
    verbose: bool,
) -> Sequence[Finding]:
    """Probe a backend; one that is named is tried out as well if `pages`."""
    backend, pages = Backend(plugin), pages and named
    if not ("kvdock_probe" in plugin.implemented or settings or pages):
        return [Finding(ok=True, what="it has nothing to probe", skipped=True)]
    try:
        typed_settings(backend, settings, "doctor")
    except SettingsError as error:
        if named:
            raise
        # Without any, it is installed and no more.
        bare = not settings
        return [Finding(ok=bare, what=error.what, hint=error.fix, skipped=bare)]
    trial = try_backend(backend, settings, timeout_s=timeout_s, hint=_LATE, pages=pages)
    return trial.findings if verbose else trial.short
