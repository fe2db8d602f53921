"""The command `kvdock show`: wiring only."""

from __future__ import annotations

from kvdock.plugin import require
from kvdock_cli.commands.list import load
from kvdock_cli.output import emit
from kvdock_cli.reports import manifest


def show(name: str, /, *, json: bool = False) -> int:
    """Show everything that one backend declares, with its settings.

    Args:
        name: The backend.
        json: Print one line of JSON.
    """
    found = load()
    plugins = {plugin.manifest.name: plugin for plugin in found.plugins}
    require([name], plugins, found.problems)
    plugin = plugins[name]
    return emit(manifest.as_text(plugin), manifest.as_data(plugin), as_json=json)
