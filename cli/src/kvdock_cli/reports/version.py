"""The output of `kvdock --version`."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvdock_cli.reports._report import Column, Report, Table

_COLUMNS = (
    Column("PART", "name"),
    Column("VERSION", "version"),
    Column("DISTRIBUTION", "distribution", drop=1),
    Column("PATH", "path"),
)


@attrs.frozen
class Part:
    """One installed part: what it is and where it comes from."""

    name: str
    version: str
    distribution: str
    path: str


def report(parts: Sequence[Part]) -> Report:
    """Report a line for each part."""
    return Report("kvdock.version/1", {"parts": parts}, [Table(_COLUMNS, parts)])
