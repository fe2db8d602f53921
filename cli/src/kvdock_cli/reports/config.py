"""The output of `kvdock config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports.list import unusable

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock import PluginProblem
    from kvdock.config import Setting
    from kvdock_cli.settings_file import Wrong


_ORIGIN = Column("ORIGIN", "origin", fold=True)
_SETTINGS = (
    Column("SETTING", "path"),
    Column("VALUE", "value", fold=True),
    _ORIGIN,
    Column("WHAT", "help", fold=True),
)
_WRONG = (
    Column("SETTING", "key", tone=Tone.BAD),
    Column("PROBLEM", "what", fold=True),
    Column("WHAT TO DO", "fix", fold=True),
)


def report(
    settings: Sequence[Setting], problems: Sequence[PluginProblem], *, origin: bool
) -> Report:
    """Report settings, and the plugins that have none; a missing one is no failure."""
    columns = [one for one in _SETTINGS if origin or one is not _ORIGIN]
    rows = [
        {
            "path": one.path,
            "value": one.typed,
            "unit": one.unit,
            "origin": one.origin,
            "help": one.help,
        }
        for one in settings
    ]
    data = {"settings": rows, "problems": problems}
    blocks: list[Block] = [Table(columns, settings), *unusable(problems)]
    return Report("kvdock.config/2", data, blocks, not problems)


def written(file: Path, backends: Sequence[str], missing: Sequence[str]) -> Report:
    """Report a file that was written, and what to do with it."""
    first = f"{file} is written; engines read it with KVDOCK_CONFIG={file.resolve()}"
    more = (
        f"Required: kvdock config set {one} VALUE --config {file}" for one in missing
    )
    data = {"path": file, "backends": backends, "missing": missing}
    return Report("kvdock.config-init/1", data, [first, *more])


def wrong(file: Path, wrong: Sequence[Wrong]) -> Report:
    """Report the problems of a file."""
    rows = [{"key": one.key, "what": one.what, "fix": one.fix} for one in wrong]
    data = {"path": file, "wrong": rows}
    blocks: list[Block] = [f"{file} is right"]
    if wrong:
        blocks = [f"Problems of {file}: {len(wrong)}", "", Table(_WRONG, wrong)]
    return Report("kvdock.config-validate/1", data, blocks, not wrong)
