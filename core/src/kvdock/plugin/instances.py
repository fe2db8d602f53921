"""Named instances: one plugin under several names, each with settings of its own.

    [backends.memory]
    plugin = "file"
    root = "/dev/shm/kv"
    [backends.disk]
    plugin = "file"
    root = "/var/cache/kv"

Wherever a backend's name is taken, an instance's name is: each has a plugin
manager, a channel, breakers and a label of its own, and shares with the others
nothing but the plugin's code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import SettingsError, did_you_mean
from kvdock.plugin.discovery import LoadStage, PluginProblem, install_hint
from kvdock.plugin.manifest import BACKEND_NAME
from kvdock.plugin.validation import OBSERVER_PREFIX, hook_manager
from kvdock.plugin.wrapper import build_wrappers, wrapped_plugin

if TYPE_CHECKING:
    from kvdock.plugin.loading import LoadedPlugin


def named_instances(settings: Mapping[str, object]) -> Mapping[str, str]:
    """Return the instances that are configured: name to the plugin's name.

    Raises:
        SettingsError: If a name cannot be one, or `plugin` is not a name.
    """
    found = {}
    for name, given in settings.items():
        plugin = given.get("plugin", name) if isinstance(given, Mapping) else name
        if not isinstance(plugin, str):
            raise SettingsError(
                f"backends.{name}.plugin is {plugin!r}, not the name of a plugin"
            )
        if plugin == name:
            continue
        if not BACKEND_NAME.fullmatch(name) or "__" in name:
            raise SettingsError(
                f"{name!r} is not a valid name of a backend",
                fix="Use a-z, 0-9 and _, beginning with a letter, without __.",
            )
        found[name] = plugin
    return MappingProxyType(found)


def add_instances(
    plugins: Mapping[str, LoadedPlugin],
    settings: Mapping[str, object],
    installed: Collection[str],
) -> tuple[dict[str, LoadedPlugin], tuple[PluginProblem, ...]]:
    """Add the configured instances to the loaded plugins, and wrap what says so.

    `installed` names all backends that are installed, loaded or not.

    Returns:
        All of them, and a problem for each instance whose plugin is not loaded.

    Raises:
        PluginError: If a wrapper cannot be used.
        SettingsError: If an instance has the name of another backend, or the
            settings of a wrapper are wrong.
    """
    found, problems = dict(plugins), []
    for name, plugin in named_instances(settings).items():
        if name in installed:
            raise SettingsError(
                f"backends.{name} says plugin={plugin!r}, but {name!r} is the name of "
                "another backend that is installed",
                fix="Choose another name for the instance.",
            )
        if plugin in plugins:
            found[name] = instance_of(plugins[plugin], name)
        else:
            problems.append(_problem(name, plugin, plugins, installed))
    for name, given in settings.items():
        wrap = given.get("wrap") if isinstance(given, Mapping) else None
        if wrap and name in found:
            wrappings = build_wrappers(wrap, where=f"backends.{name}")
            found[name] = wrapped_plugin(found[name], wrappings)
    return found, tuple(problems)


def instance_of(plugin: LoadedPlugin, name: str) -> LoadedPlugin:
    """Return a plugin once more, under another name and without observers."""
    manager = hook_manager()
    for one, registered in plugin.manager.list_name_plugin():
        if not one.startswith(OBSERVER_PREFIX):
            manager.register(registered, name=one)
    return attrs.evolve(
        plugin,
        candidate=attrs.evolve(plugin.candidate, name=name),
        manifest=attrs.evolve(plugin.manifest, name=name),
        manager=manager,
        instance_of=plugin.instance_of or plugin.candidate.name,
    )


def _problem(
    name: str, plugin: str, plugins: Collection[str], installed: Collection[str]
) -> PluginProblem:
    if plugin in installed:
        cause = f"its plugin {plugin!r} is installed and not loaded"
        fix = "See `kvdock doctor`, and KVDOCK_PLUGINS."
    else:
        cause = f"its plugin {plugin!r} is not installed"
        fix = install_hint(plugin) or did_you_mean(plugin, plugins)
    return PluginProblem(
        name=name,
        stage=LoadStage.DISCOVER,
        cause=cause,
        fix=fix or f"Installed: {', '.join(sorted(installed)) or 'none'}.",
    )
