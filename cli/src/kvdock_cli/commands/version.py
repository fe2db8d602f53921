"""The command `kvdock --version`: wiring only."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Sequence

from kvdock import compiled
from kvdock.plugin import (
    BACKENDS_GROUP,
    COMMANDS_GROUP,
    OBSERVERS_GROUP,
    list_entry_points,
)
from kvdock_cli.output import emit
from kvdock_cli.reports._report import Column, Report, Table

_FIELDS = ("name", "version", "distribution", "path")
_COLUMNS = (
    Column("PART", "name"),
    Column("VERSION", "version"),
    Column("DISTRIBUTION", "distribution", drop=1),
    Column("PATH", "path"),
)


def versions(*, json: bool) -> int:
    """Print every part with its version and path; import no plugin."""
    points = list_entry_points(OBSERVERS_GROUP, BACKENDS_GROUP, COMMANDS_GROUP)
    # Both announce some, so nothing else has to look for their versions.
    known = {one.distribution: one.version for one in points}
    is_compiled = compiled.library() is not None
    parts = [
        ("python", platform.python_version(), "python", sys.executable),
        *(
            (name, known.get(name, "?"), name, path_of(module))
            for name, module in (("kvdock", "kvdock"), ("kvdock-cli", "kvdock_cli"))
        ),
        (
            "compiled pages",
            "yes" if is_compiled else "no",
            "kvdock",
            compiled.library_path() if is_compiled else "-",
        ),
        *(
            (
                f"{group.rpartition('.')[2].removesuffix('s')} {one.name}",
                one.version,
                one.distribution,
                path_of(one.value),
            )
            for group in (BACKENDS_GROUP, COMMANDS_GROUP)
            for one in points
            if one.group == group and one.distribution != "kvdock-cli"
        ),
    ]
    return emit(report(parts), as_json=json)


def report(parts: Sequence[tuple[str, ...]]) -> Report:
    """Report a line for each part: its name, version, distribution and path."""
    rows = [dict(zip(_FIELDS, part, strict=True)) for part in parts]
    return Report("kvdock.version/1", {"parts": rows}, [Table(_COLUMNS, rows)])


def path_of(value: str) -> str:
    """Return the file that an entry point names, without importing it."""
    try:
        spec = importlib.util.find_spec(value.partition(":")[0].strip())
    except Exception:  # noqa: BLE001 - a broken parent package
        return "?"
    return (spec and spec.origin) or "?"
