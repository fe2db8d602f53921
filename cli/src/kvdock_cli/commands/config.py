"""Show the settings in force, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock.config import explain, load_configuration
from kvdock.plugin import OBSERVERS_GROUP, list_entry_points, load_observers
from kvdock_cli.commands.list import load
from kvdock_cli.output import emit
from kvdock_cli.reports import config as report
from kvdock_cli.terminal import style_of


def show(
    *, config: Path | None = None, origin: bool = False, json: bool = False
) -> int:
    """Show every setting that holds here: the core's, backends', observers'.

    Reads what an engine would read, except for what the engine itself passes.
    From weak to strong: defaults, variables of others, files of others, the file,
    the environment, the engine.

    Args:
        config: A TOML or JSON file; without it, the one that KVDOCK_CONFIG names.
        origin: Also say where each value comes from.
        json: Print one line of JSON.
    """
    backends = load()
    observers, problems = load_observers(list_entry_points(OBSERVERS_GROUP))
    schemas = {
        f"backends.{plugin.manifest.name}": plugin.manifest.settings
        for plugin in backends.plugins
        if plugin.manifest.settings is not None
    }
    schemas |= {f"observers.{name}": one.settings for name, one in observers.items()}
    problems = (*backends.problems, *problems)
    # What is broken has no schema to hold its settings against.
    configuration = load_configuration(file=config).without(
        f"{one.group.removeprefix('kvdock.')}.{one.name}" for one in problems
    )
    found = explain(configuration, schemas)
    return emit(
        report.as_text(found, problems, style_of(), origin=origin),
        report.as_data(found, problems),
        as_json=json,
    )


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType({"show": show})
