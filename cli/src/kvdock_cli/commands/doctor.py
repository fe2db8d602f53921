"""The command `kvdock doctor`: asks every plugin; the report formats the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdock import AttachConfig, Backend, Finding, Observer
from kvdock.config import load_configuration, structure
from kvdock.errors import SettingsError, did_you_mean
from kvdock.plugin import (
    BrokenPlugin,
    Candidate,
    LoadedPlugin,
    PluginProblem,
    import_entry_point,
    list_entry_points,
    load_observers,
    run_probe,
    split_duplicates,
)
from kvdock_cli import registry
from kvdock_cli.arguments import patience, settings_of
from kvdock_cli.commands._self_test import self_test as try_out
from kvdock_cli.commands.list import load
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports.doctor import (
    Diagnosis,
    Row,
    Section,
    State,
    as_data,
    as_text,
    rows_of,
)

GROUP = "kvdock.doctors"

Ask = Callable[[], Iterable[Finding]]


def doctor(
    name: str | None = None,
    /,
    *,
    set_: tuple[str, ...] = (),
    timeout: float = 10.0,
    no_self_test: bool = False,
    json: bool = False,
) -> int:
    """Find out what is wrong: with plugins, with what they need, with commands.

    Backends are probed with the settings that an engine would read from the
    file and the environment. One that lacks some is skipped until it is named
    and they are given. One that is named and in order is then tried out: a page
    of each kind is stored, found, read back, compared and dropped.

    Args:
        name: One backend, or a section that another distribution adds.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        timeout: Seconds that each may take.
        no_self_test: Do not store a page to try a backend out.
        json: Print one line of JSON.
    """
    settings = settings_of(set_)
    if settings and name is None:
        raise UsageProblem(
            "settings are given, but no backend to give them to",
            fix="Write `kvdock doctor NAME --set KEY=VALUE`.",
        )
    diagnosis = diagnose(
        name, settings, timeout_s=patience(timeout), self_test=not no_self_test
    )
    return emit(as_text(diagnosis), as_data(diagnosis), as_json=json)


def diagnose(
    name: str | None,
    settings: Mapping[str, str],
    *,
    timeout_s: float,
    self_test: bool = False,
) -> Diagnosis:
    """Examine one name, or everything."""
    found = load()
    doctors, problems = _doctors()
    observers, unfit = _observers(found.observers)
    problems = (*found.problems, *registry.problems(), *problems, *unfit)
    candidates = [*(one.candidate for one in found.plugins), *observers, *doctors]
    _check_known(name, [one.name for one in (*candidates, *problems)])
    sections_of = ("backends", "observers") if settings else ()
    configured = load_configuration({one: {name: settings} for one in sections_of})
    sections = [
        Section(
            one.candidate,
            _backend(
                one,
                configured.backends.get(one.manifest.name, {}),
                timeout_s,
                named=name is not None,
                self_test=self_test and name is not None,
            ),
        )
        for one in found.plugins
        if name in (None, one.manifest.name)
    ]
    sections += [
        Section(one, _settings_of(observer, configured.observers.get(one.name, {})))
        for one, observer in observers.items()
        if one.name == name or (name is None and one.name in configured.observers)
    ]
    sections += [
        Section(one, rows_of(_within(timeout_s, _asking(ask, settings))))
        for one, ask in doctors.items()
        if name in (None, one.name)
    ]
    return Diagnosis(
        sections=sections,
        problems=[one for one in problems if name in (None, one.name)],
        hidden=found.hidden if name is None else (),
    )


def _check_known(name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise UsageProblem(
            f"there is nothing called {name!r} to examine",
            fix=did_you_mean(name, known) or f"Known: {', '.join(sorted(set(known)))}.",
        )


def _observers(
    installed: Iterable[Candidate],
) -> tuple[dict[Candidate, Observer], tuple[PluginProblem, ...]]:
    candidates = tuple(installed)
    found, problems = load_observers(candidates)
    return {one: found[one.name] for one in candidates if one.name in found}, problems


def _settings_of(observer: Observer, given: Mapping[str, object]) -> tuple[Row, ...]:
    """Look at an observer's settings; it is built only around a backend."""
    where = f"observer {observer.name!r}"
    try:
        structure(observer.settings, given, where=where)
    except SettingsError as error:
        return (Row(State.PROBLEM, error.what, error.fix),)
    return (Row(State.OK, "its settings are in order"),)


def _doctors() -> tuple[dict[Candidate, Any], tuple[Any, ...]]:
    alone, problems = split_duplicates(list_entry_points(GROUP))
    doctors = {}
    for candidate in alone:
        try:
            doctors[candidate] = import_entry_point(candidate)
        except BrokenPlugin as broken:
            problems += (broken.problem,)
    return doctors, problems


def _asking(ask: Any, settings: Mapping[str, str]) -> Ask:  # noqa: ANN401 - a function of any distribution
    return lambda: ask(settings)


def _backend(
    plugin: LoadedPlugin,
    settings: Mapping[str, object],
    timeout_s: float,
    *,
    named: bool,
    self_test: bool,
) -> tuple[Row, ...]:
    backend = Backend(plugin)
    probes = "kvdock_probe" in plugin.implemented
    if not probes and not settings and not self_test:
        return (Row(State.SKIPPED, "it has nothing to probe"),)
    try:
        config = AttachConfig(settings=backend.settings(settings))
    except SettingsError as error:
        if named:
            raise
        hint = f"Write `kvdock doctor {backend.name} --set KEY=VALUE`."
        state = State.PROBLEM if settings else State.SKIPPED
        return (Row(state, error.what, hint),)
    findings = tuple(_within(timeout_s, lambda: backend.probe(config)))
    if self_test and all(finding.ok for finding in findings):
        findings += tuple(_within(timeout_s, lambda: try_out(backend, settings)))
    return rows_of(findings)


def _within(timeout_s: float, ask: Ask) -> Iterable[Finding]:
    """Ask on a thread of its own, so that one that hangs is a finding."""
    answers: list[Iterable[Finding]] = []
    thread = threading.Thread(
        target=lambda: answers.append(run_probe(ask)), daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    if answers:
        return answers[0]
    return (
        Finding(
            ok=False,
            what=f"no answer within {timeout_s:g} s",
            hint="Look for what it waits for, or raise --timeout.",
        ),
    )
