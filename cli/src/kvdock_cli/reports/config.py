"""What `kvdock config show` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, plain, table
from kvdock_cli.reports.list import unusable

if TYPE_CHECKING:
    from kvdock import PluginProblem
    from kvdock.config import Setting

SCHEMA = "kvdock.config/2"


def as_text(
    settings: Sequence[Setting],
    problems: Sequence[PluginProblem],
    style: Style = PLAIN,
    *,
    origin: bool,
) -> str:
    """Render the settings as a table, and name the plugins that have none."""
    headings = ["SETTING", "VALUE", "ORIGIN", "WHAT"]
    rows: list[list[str | Cell]] = [
        [
            one.path,
            Cell(one.value or "-", Tone.BAD if one.value == "MISSING" else None),
            one.origin,
            one.help,
        ]
        for one in settings
    ]
    if not origin:
        headings.remove("ORIGIN")
        for row in rows:
            del row[2]
    fold = ["VALUE", "ORIGIN", "WHAT"]
    lines = table(headings, rows, style, fold=fold)
    return "\n".join([*lines, *unusable(problems, style)])


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
