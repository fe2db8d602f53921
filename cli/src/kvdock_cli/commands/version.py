"""The command `kvdock --version`: wiring only."""

from __future__ import annotations

import importlib.util
import platform
import sys

from kvdock import compiled
from kvdock.plugin import (
    BACKENDS_GROUP,
    COMMANDS_GROUP,
    OBSERVERS_GROUP,
    list_entry_points,
)
from kvdock_cli.output import emit
from kvdock_cli.reports import version as report


def versions(*, json: bool) -> int:
    """Print every part with its version and path; import no plugin."""
    points = list_entry_points(OBSERVERS_GROUP, BACKENDS_GROUP, COMMANDS_GROUP)
    # Both announce some, so nothing else has to look for their versions.
    known = {one.distribution: one.version for one in points}
    is_compiled = compiled.library() is not None
    parts = [
        report.Part("python", platform.python_version(), "python", sys.executable),
        *(
            report.Part(name, known.get(name, "?"), name, path_of(module))
            for name, module in (("kvdock", "kvdock"), ("kvdock-cli", "kvdock_cli"))
        ),
        report.Part(
            "compiled pages",
            "yes" if is_compiled else "no",
            "kvdock",
            compiled.library_path() if is_compiled else "-",
        ),
        *(
            report.Part(
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
    return emit(report.report(parts), as_json=json)


def path_of(value: str) -> str:
    """Return the file that an entry point names, without importing it."""
    try:
        spec = importlib.util.find_spec(value.partition(":")[0].strip())
    except Exception:  # noqa: BLE001 - a broken parent package
        return "?"
    return (spec and spec.origin) or "?"
