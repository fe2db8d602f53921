"""The output of `kvdock --version`."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvdock_cli.reports._style import PLAIN, Style
from kvdock_cli.reports._tables import plain, table

SCHEMA = "kvdock.version/1"


@attrs.frozen
class Part:
    """One installed part: what it is and where it comes from."""

    name: str
    version: str
    distribution: str
    path: str


def as_text(parts: Sequence[Part], style: Style = PLAIN) -> str:
    """Render one line for each part."""
    rows = [(one.name, one.version, one.distribution, one.path) for one in parts]
    headings = ("PART", "VERSION", "DISTRIBUTION", "PATH")
    return "\n".join(table(headings, rows, style, drop=["DISTRIBUTION"]))


def as_data(parts: Sequence[Part]) -> dict[str, object]:
    """Describe the parts as data."""
    return {"schema": SCHEMA, "ok": True, "parts": plain(parts)}
