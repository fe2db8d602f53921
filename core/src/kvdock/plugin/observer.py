"""Observers: plugins that only wrap, and never answer in a backend's place.

An entry point in `kvdock.observers` names an `Observer` record. It is built
once with its settings and registered on every backend's own plugin manager,
where its hook wrappers see each batch and `kvdock_observe` each event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvdock.errors import SettingsError, did_you_mean
from kvdock.plugin.discovery import OBSERVERS_GROUP, usable_entry_points
from kvdock.plugin.extension import Extension


@attrs.frozen(kw_only=True)
class Observer(Extension):
    """The record of an entry point in `kvdock.observers`; it builds the hooks."""


def find_observer(name: str) -> Observer:
    """Load one observer by name.

    Raises:
        PluginError: If none of that name is installed, or it cannot be used.
    """
    return Observer.find(name, usable_entry_points(OBSERVERS_GROUP))


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
        name: find_observer(name).built(settings.get(name, {}), f"observer {name!r}")
        for name in dict.fromkeys(names)
    }
