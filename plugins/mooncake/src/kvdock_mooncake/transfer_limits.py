"""How many pieces may be under way over TCP, and how long each of them lasts.

The library waits 60 s for a call's transfers, by the clock of the wall, and gives
up those that have not ended. Their pieces stay queued on its connections, and are
read from or written to the caller's memory once the peer answers again. So the
library's own timeouts are set such that all pieces of a call have failed before.
That holds while connections are accepted: a frozen peer accepts 128 of them, and
one behind a broken network none. `held_memory` is for what is left.

Measured with 0.3.13.post1, a frozen owner on loopback and `MC_TCP_*_TIMEOUT_SEC`
of T: 24 pieces over 4 connections fail within 8 T, 128 over 16 within 11 to 14 T;
with 256 over 16 the peer's backlog is full, and the call is given up after 60 s.

Source: Mooncake 0.3.13, tcp_transport_session_impl.h, tcp_transport_lane_impl.h,
transfer_task.cpp (`TransferEngineOperationState::wait_for_completion`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvdock_mooncake.settings import Protocol

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

LIBRARY_WAIT_S = 60.0
_END_WITHIN_S = 50.0

_PROGRESS = "MC_TCP_PROGRESS_TIMEOUT_SEC"
_STATUS = "MC_TCP_STATUS_TIMEOUT_SEC"
_LANES = "MC_TCP_LANES_PER_PEER"
_LANES_BEFORE = "MC_TCP_MAX_CONNECTIONS_PER_PEER"

_TIMEOUT_S = 2
_LIBRARY_TIMEOUT_S = 30
_LIBRARY_LANES = 4
_MOST_LANES = 16
_BUSY_LANES = 0.7
"""Part of the connections that work at a time: they reconnect one by one."""

_TCP_PIECES = 128
_OTHER_PIECES = 1024

TIMEOUTS = MappingProxyType(
    {_PROGRESS: str(_TIMEOUT_S), _STATUS: str(_TIMEOUT_S), _LANES: str(_MOST_LANES)}
)
"""What the plugin sets where the user has not."""


def pieces_at_once(
    settings: MooncakeSettings, environ: Mapping[str, str] | None = None
) -> int:
    """Return how many pieces of memory may be under way at once."""
    environ = os.environ if environ is None else environ
    if settings.max_pieces:
        return settings.max_pieces
    if settings.protocol is not Protocol.TCP:
        return _OTHER_PIECES
    # Where not even one piece ends in time, shorter calls would not help.
    return min(_TCP_PIECES, _pieces_in_time(environ) or _TCP_PIECES)


def warnings(
    settings: MooncakeSettings, environ: Mapping[str, str] | None = None
) -> list[str]:
    """Say which values let pieces of a call outlast the library's wait for it."""
    environ = os.environ if environ is None else environ
    if settings.protocol is not Protocol.TCP:
        return []
    kept = (
        "the memory of what is given up then stays leased until the store is "
        "closed or replaced"
    )
    found = [
        f"{name}={environ[name]} is longer than a frozen owner may take before the "
        f"library gives a call up ({LIBRARY_WAIT_S:g} s): {kept}; set at most "
        f"{_longest_s(environ)}"
        for name in (_PROGRESS, _STATUS)
        if _seconds(environ, name) > _END_WITHIN_S
    ]
    most = _pieces_in_time(environ)
    if not found and settings.max_pieces > most:
        found.append(
            f"max_pieces {settings.max_pieces} is more than the {most} pieces that "
            f"end before the library gives a call up ({LIBRARY_WAIT_S:g} s): {kept}"
        )
    elif not found and most < _TCP_PIECES:
        found.append(
            f"{_PROGRESS}, {_STATUS} and {_LANES} let {most} pieces of memory end "
            f"before the library gives a call up: calls are cut to that; with at most "
            f"{_longest_s(environ)} seconds they have {_TCP_PIECES}"
        )
    return found


def _pieces_in_time(environ: Mapping[str, str]) -> int:
    """Return how many pieces have surely failed before the library gives up."""
    seconds = max(_seconds(environ, _PROGRESS), _seconds(environ, _STATUS))
    return int(_busy(environ) * (_END_WITHIN_S // seconds))


def _longest_s(environ: Mapping[str, str]) -> int:
    """Return the longest timeout with which a full call ends in time."""
    rounds = -(-_TCP_PIECES // _busy(environ))
    return max(1, int(_END_WITHIN_S // rounds))


def _busy(environ: Mapping[str, str]) -> int:
    lanes = environ.get(_LANES) or environ.get(_LANES_BEFORE) or ""
    given = int(lanes) if lanes.isdecimal() else 0
    known = given if 1 <= given <= _MOST_LANES else _LIBRARY_LANES
    return max(1, int(known * _BUSY_LANES))


def _seconds(environ: Mapping[str, str], name: str) -> int:
    """Read a timeout as the library does: what is not above 0 is its default."""
    value = environ.get(name, "").strip()
    seconds = int(value) if value.isdecimal() else 0
    return seconds or _LIBRARY_TIMEOUT_S
