"""Show the settings in force, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock import discovery
from kvdock.configuration import explain, load_configuration
from kvdock.observers import GROUP, find_observer
from kvdock_cli.listing import load
from kvdock_cli.output import emit
from kvdock_cli.reports import configuration as report


def show(
    *, config: Path | None = None, origin: bool = False, json: bool = False
) -> int:
    """Show every setting that holds here: the core's, backends', observers'.

    Reads what an engine would read, except for what the engine itself passes.
    From weak to strong: defaults, the file, the environment, the engine.

    Args:
        config: A TOML or JSON file; without it, the one that KVDOCK_CONFIG names.
        origin: Also say where each value comes from.
        json: Print one line of JSON.
    """
    found = explain(load_configuration(file=config), _schemas())
    return emit(
        report.as_text(found, origin=origin), report.as_data(found), as_json=json
    )


def _schemas() -> dict[str, type]:
    backends = {
        f"backends.{plugin.manifest.name}": plugin.manifest.settings
        for plugin in load().plugins
        if plugin.manifest.settings is not None
    }
    observers = {
        f"observers.{one.name}": find_observer(one.name).settings
        for one in discovery.installed(GROUP)
    }
    return backends | observers


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType({"show": show})
