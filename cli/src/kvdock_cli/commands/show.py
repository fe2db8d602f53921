"""The command `kvdock show`: wiring only."""

from __future__ import annotations

from kvdock.config import load_configuration
from kvdock.plugin import require
from kvdock_cli.commands.list import load
from kvdock_cli.output import emit
from kvdock_cli.reports import manifest
from kvdock_cli.terminal import style_of


def show(name: str, /, *, json: bool = False) -> int:
    """Show everything that one backend declares, with its settings.

    Args:
        name: The backend.
        json: Print one line of JSON.
    """
    found = load(load_configuration().backends, only=name)
    plugins = {plugin.manifest.name: plugin for plugin in found.plugins}
    require([name], plugins, found.problems)
    plugin = plugins[name]
    text = manifest.as_text(plugin, style_of())
    return emit(text, manifest.as_data(plugin), as_json=json)
