"""Servers and oracles that a backend brings along for a demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvdock.plugin import Candidate, import_entry_point, list_entry_points

SERVERS = "kvdock.servers"
"""Entry points of servers that run for as long as a demo, by backend."""

ORACLES = "kvdock.oracles"
"""Entry points of what reads and damages stored bytes, by backend."""

Settings = Mapping[str, object]


@contextmanager
def served(name: str, given: Settings) -> Iterator[tuple[Settings, str]]:
    """Start the server that a backend announces, if it announces one.

    Args:
        name: The backend.
        given: The user's settings for it.

    Yields:
        The settings to use, and a sentence that says what was started; "" for
        nothing.

    Raises:
        KvdockError: If the server cannot be started.
    """
    found = _announced(SERVERS, name)
    if found is None:
        yield given, ""
        return
    start: Any = import_entry_point(found)
    with start(given) as (settings, notice):
        yield settings, notice


def has_oracle(name: str) -> bool:
    """Return whether stored bytes of a backend can be damaged by their keys."""
    return _announced(ORACLES, name) is not None


def flip(name: str, settings: object, key: str, offset: int) -> bool:
    """Change one bit of a stored object; return whether the object is there.

    Args:
        name: The backend.
        settings: Its settings, converted.
        key: The object.
        offset: Which byte of it.
    """
    found = _announced(ORACLES, name)
    if found is None:
        return False
    make: Any = import_entry_point(found)
    oracle = make(settings)
    stored = oracle.peek(key)
    if stored is None or len(stored) <= offset:
        return False
    oracle.poke(key, offset, bytes([stored[offset] ^ 1]))
    return True


def _announced(group: str, name: str) -> Candidate | None:
    return next((one for one in list_entry_points(group) if one.name == name), None)
