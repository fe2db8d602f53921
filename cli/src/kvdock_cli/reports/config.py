"""The output of `kvdock config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, plain, table
from kvdock_cli.reports.list import unusable

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock import PluginProblem
    from kvdock.config import Setting
    from kvdock_cli.settings_file import Wrong

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


def written_text(file: Path, missing: Sequence[str]) -> str:
    """Say what to do with a file that was written."""
    first = f"{file} is written; engines read it with KVDOCK_CONFIG={file.resolve()}"
    more = (
        f"Required: kvdock config set {one} VALUE --config {file}" for one in missing
    )
    return "\n".join([first, *more])


def written_data(
    file: Path, backends: Sequence[str], missing: Sequence[str]
) -> dict[str, object]:
    """Describe a file that was written as data."""
    data = {"path": str(file), "backends": [*backends], "missing": [*missing]}
    return {"schema": "kvdock.config-init/1", "ok": True, **data}


def wrong_text(file: Path, wrong: Sequence[Wrong], style: Style = PLAIN) -> str:
    """Render the problems of a file."""
    if not wrong:
        return f"{file} is right"
    rows = [(Cell(one.key or "-", Tone.BAD), one.what, one.fix) for one in wrong]
    headings = ("SETTING", "PROBLEM", "WHAT TO DO")
    lines = table(headings, rows, style, fold=["PROBLEM", "WHAT TO DO"])
    return "\n".join([f"Problems of {file}: {len(wrong)}", "", *lines])


def wrong_data(file: Path, wrong: Sequence[Wrong]) -> dict[str, object]:
    """Describe the problems of a file as data."""
    rows = [{"key": one.key, "what": one.what, "fix": one.fix} for one in wrong]
    data = {"path": str(file), "wrong": rows}
    return {"schema": "kvdock.config-validate/1", "ok": not wrong, **data}
