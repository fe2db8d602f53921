"""The output of `kvdock ns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvdock.namespace import flatten_record, namespace_digest
from kvdock_cli.reports._style import PLAIN, Style
from kvdock_cli.reports._tables import columns, plain, table

if TYPE_CHECKING:
    from kvdock.namespace import Difference

SCHEMA = "kvdock.ns/1"
DIFF_SCHEMA = "kvdock.ns-diff/1"


def as_text(record: Mapping[str, object], style: Style = PLAIN) -> str:
    """Render a record, its digest first."""
    rows = [("digest", namespace_digest(record)), *flatten_record(record).items()]
    return "\n".join(columns(rows, style))


def as_data(record: Mapping[str, object]) -> dict[str, object]:
    """Describe a record as it is kept."""
    return {
        "schema": SCHEMA,
        "ok": True,
        "digest": namespace_digest(record),
        "record": record,
    }


def diff_text(found: Sequence[Difference], style: Style = PLAIN) -> str:
    """Render differences as a table."""
    if not found:
        return "The same namespace: bytes are interchangeable."
    rows = [(one.field, one.left, one.right) for one in found]
    return "\n".join(table(("FIELD", "A", "B"), rows, style, fold=["A", "B"]))


def diff_data(found: Sequence[Difference]) -> dict[str, object]:
    """Describe differences; all is well if there are none."""
    return {"schema": DIFF_SCHEMA, "ok": not found, "differences": plain(found)}
