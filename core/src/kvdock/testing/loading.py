"""Load the backend under test, installed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import (
    ORACLES,
    Candidate,
    import_entry_point,
    list_entry_points,
    require,
)
from kvdock.plugin.loading import LoadedPlugin, load_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.testing.oracles import Oracle


def load_backend(plugin: str) -> Backend:
    """Load the plugin under test.

    Args:
        plugin: The name of an installed backend, or `package.module` or
            `package.module:attribute` of one that need not be installed, or that is
            loaded already, with wrappers around its stores.

    Raises:
        PluginError: If it cannot be loaded.
    """
    found = [one for one in list_entry_points() if one.name == plugin]
    if "." in plugin or ":" in plugin:
        given = import_entry_point(_unnamed(plugin))
        if isinstance(given, LoadedPlugin):
            return Backend(given)
        found = [_uninstalled(plugin, given)]
    plugins, problems = load_all(found)
    name = found[0].name if found else plugin
    require([name], plugins, problems)
    return Backend(plugins[name])


def _unnamed(value: str) -> Candidate:
    return Candidate(name=value, value=value, distribution="?", version="?")


def _uninstalled(value: str, plugin: Any) -> Candidate:  # noqa: ANN401 - anything
    """Describe what no entry point announces, under its manifest's name."""
    try:
        return attrs.evolve(_unnamed(value), name=plugin.kvdock_manifest().name)
    except Exception:  # noqa: BLE001 - loading it names what is wrong
        return _unnamed(value)


def oracle_of(backend: Backend, settings: Mapping[str, object]) -> Oracle | None:
    """Return the oracle that a backend's distribution brings, if it does.

    Raises:
        PluginError: If it cannot be loaded.
        SettingsError: If a setting is wrong.
    """
    candidate = backend.plugin.candidate
    if not candidate.oracle:
        return None
    oracle = attrs.evolve(candidate, value=candidate.oracle, group=ORACLES)
    make: Any = import_entry_point(oracle)
    found: Oracle = make(backend.settings(settings))
    return found
