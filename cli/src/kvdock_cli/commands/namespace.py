"""Show and compare namespaces: what stored bytes belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvdock.errors import NamespaceError
from kvdock.namespace import RECORD_NAME, diff_records, load_record
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import namespace as report
from kvdock_cli.terminal import style_of


def show(dir: Path, /, *, json: bool = False) -> int:  # noqa: A002 - the word for it
    """Show what the bytes of a namespace belong to, and verify its digest.

    Args:
        dir: The folder of one namespace in a store, or its namespace.json.
        json: Print one line of JSON.
    """
    record = _record(dir)
    text = report.as_text(record, style_of())
    return emit(text, report.as_data(record), as_json=json)


def diff(a: Path, b: Path, /, *, json: bool = False) -> int:
    """Say in which fields two namespaces differ; exit 1 if they do.

    Args:
        a: The folder of a namespace, or its namespace.json.
        b: The other one.
        json: Print one line of JSON.
    """
    found = diff_records(_record(a), _record(b))
    text = report.diff_text(found, style_of())
    return emit(text, report.diff_data(found), as_json=json)


def _record(place: Path) -> dict[str, object]:
    try:
        return load_record(place)
    except NamespaceError as error:
        folders = sorted(found.parent.name for found in place.glob(f"*/{RECORD_NAME}"))
        if not folders and isinstance(error.__cause__, OSError):
            raise UsageProblem(error.what, fix=error.fix) from error
        if not folders:
            raise
        raise UsageProblem(
            f"{place} holds {len(folders)} namespaces",
            fix=f"Pass one of them: {', '.join(folders)}",
        ) from error


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"show": show, "diff": diff}
)
