"""Observers: plugins that only wrap, and never answer in a backend's place.

An entry point in `kvdock.observers` names an `Observer` record. It is built
once with its settings and registered on every backend's own plugin manager,
where its hook wrappers see each batch and `kvdock_observe` each event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvdock.config.schema import structure
from kvdock.errors import KvdockError, PluginError, SettingsError, did_you_mean
from kvdock.plugin.discovery import (
    OBSERVERS_GROUP,
    BrokenPlugin,
    Candidate,
    PluginProblem,
    import_entry_point,
    list_entry_points,
    split_duplicates,
)
from kvdock.plugin.validation import LoadStage


@attrs.frozen(kw_only=True)
class Observer:
    """What an entry point in `kvdock.observers` names.

    Args:
        name: The entry point's name.
        summary: What it does, in one line.
        settings: The attrs class of its settings.
        build: Makes the object with the hooks from such settings.
        needs: What to install for it, or "".
    """

    name: str
    summary: str
    settings: type
    build: Callable[[Any], object]
    needs: str = ""


def find_observer(name: str) -> Observer:
    """Load one observer by name.

    Raises:
        PluginError: If none of that name is installed, or it cannot be used.
    """
    candidates = [one for one in list_entry_points(OBSERVERS_GROUP) if one.name == name]
    if not candidates:
        known = {one.name for one in list_entry_points(OBSERVERS_GROUP)}
        raise PluginError(
            f"no observer {name!r} is installed",
            fix=did_you_mean(name, known)
            or f"Installed: {', '.join(sorted(known)) or 'none'}.",
        )
    found, problems = load_observers(candidates)
    if problems:
        raise BrokenPlugin(problems[0])
    return found[name]


def load_observers(
    candidates: Sequence[Candidate],
) -> tuple[dict[str, Observer], tuple[PluginProblem, ...]]:
    """Load observers one by one; a broken one never stops the others.

    Returns:
        The observers that can be used, by name, and a problem for each of the
        others.
    """
    found: dict[str, Observer] = {}
    alone, problems = split_duplicates(candidates)
    for candidate in alone:
        try:
            found[candidate.name] = _loaded(candidate)
        except BrokenPlugin as broken:
            problems += (broken.problem,)
    return found, problems


def build_observers(
    names: Sequence[str], settings: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """Build observers with their settings; `Dock.observe` adds them.

    Raises:
        PluginError: If one cannot be used.
        SettingsError: If its settings are wrong, or are given for one that is
            not among the names.
    """
    for name in settings:
        if name not in names:
            raise SettingsError(
                f"settings are given for observer {name!r}, which is not switched on",
                fix=did_you_mean(name, names) or f"Add {name!r} to core.observers.",
            )
    return {
        name: _built(find_observer(name), settings.get(name, {}))
        for name in dict.fromkeys(names)
    }


def _built(observer: Observer, given: Mapping[str, object]) -> object:
    name = observer.name
    options: object = structure(observer.settings, given, where=f"observer {name!r}")
    try:
        return observer.build(options)
    except ImportError as error:
        raise PluginError(
            f"observer {name!r} cannot be used: {error}",
            fix=f"pip install '{observer.needs}'" if observer.needs else "",
        ) from error
    except KvdockError:
        raise  # it says itself what is wrong, and what to do
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise PluginError(f"observer {name!r} cannot be used: {what}") from error


def _loaded(candidate: Candidate) -> Observer:
    found = import_entry_point(candidate)
    if not isinstance(found, Observer) or found.name != candidate.name:
        raise BrokenPlugin(
            candidate.problem(
                LoadStage.MANIFEST,
                f"it is {found!r}, and no Observer of that name",
                "Point its entry point at a kvdock.observers.Observer of that name.",
            )
        )
    return found
