"""The command `kvdock list`: wiring only."""

from __future__ import annotations

import os

from kvdock.plugin import (
    OBSERVERS_GROUP,
    allow_list,
    filter_allowed,
    list_entry_points,
    load_all,
    missing_allowed,
)
from kvdock_cli.output import emit
from kvdock_cli.reports import list as report
from kvdock_cli.terminal import style_of


def list_backends(*, json: bool = False, markdown: bool = False) -> int:
    """List the installed backends and what they declare, and the observers.

    Reads what they declare and nothing else: no client library is imported
    and no connection opened.

    Args:
        json: Print one line of JSON.
        markdown: Print the table of the README.
    """
    found = load()
    text = report.as_markdown(found) if markdown else report.as_text(found, style_of())
    return emit(text, report.as_data(found), as_json=json)


def load() -> report.Listing:
    """Load every backend that KVDOCK_PLUGINS allows."""
    names = allow_list(os.environ)
    candidates = list_entry_points()
    kept = tuple(filter_allowed(candidates, names))
    plugins, problems = load_all(kept)
    return report.Listing(
        plugins=tuple(plugins.values()),
        observers=list_entry_points(OBSERVERS_GROUP),
        problems=(*problems, *missing_allowed(candidates, names)),
        hidden=sorted({one.name for one in candidates} - {one.name for one in kept}),
    )
