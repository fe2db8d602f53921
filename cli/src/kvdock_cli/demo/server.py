"""Servers that a backend brings along for a demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvdock.plugin import import_entry_point, list_entry_points

SERVERS = "kvdock.servers"
"""Entry points of servers that run for as long as a demo, by backend."""

Settings = Mapping[str, object]


@contextmanager
def served(name: str, given: Settings) -> Iterator[tuple[Settings, str]]:
    """Start the server that a backend announces, if it announces one.

    Yields:
        The settings to use, and a sentence that says what was started; "" for
        nothing.
    """
    found = [one for one in list_entry_points(SERVERS) if one.name == name]
    if not found:
        yield given, ""
        return
    start: Any = import_entry_point(found[0])
    with start(given) as (settings, notice):
        yield settings, notice
