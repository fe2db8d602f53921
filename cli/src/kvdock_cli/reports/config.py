"""What `kvdock config show` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports._tables import columns, plain
from kvdock_cli.reports.list import unusable

if TYPE_CHECKING:
    from kvdock import PluginProblem
    from kvdock.config import Setting

SCHEMA = "kvdock.config/2"


def as_text(
    settings: Sequence[Setting], problems: Sequence[PluginProblem], *, origin: bool
) -> str:
    """Render the settings as a table, and name the plugins that have none."""
    rows = [("SETTING", "VALUE", "ORIGIN", "WHAT")]
    rows += [(one.path, one.value or "-", one.origin, one.help) for one in settings]
    if not origin:
        rows = [(path, value, what, "") for path, value, _, what in rows]
    return "\n".join([*columns(rows), *unusable(problems)])


def as_data(
    settings: Sequence[Setting], problems: Sequence[PluginProblem]
) -> dict[str, object]:
    """Describe the settings as data; what is missing is not a failure here."""
    return {
        "schema": SCHEMA,
        "ok": not problems,
        "settings": [
            {
                "path": one.path,
                "value": plain(one.typed),
                "unit": one.unit,
                "origin": one.origin,
                "help": one.help,
            }
            for one in settings
        ],
        "problems": plain(problems),
    }
