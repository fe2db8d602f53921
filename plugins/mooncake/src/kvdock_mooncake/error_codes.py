"""The meaning of the client library's numbers.

The library returns negative numbers and has no enum for them in Python. They
are the same in every release that this plugin accepts.

Source: Mooncake 0.3.13, mooncake-store/include/types.h, ErrorCode.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs
import numpy as np

from kvdock import Outcome
from kvdock.arrays import Int64Array, OutcomeArray

NO_ROOM = -200
"""No segment has room: full of leased objects, or there is no segment."""
BAD_ARGUMENTS = -600
"""Also the answer for a buffer that is smaller than the object."""
NOT_READY = -703
"""Another writer of this key is not done yet."""
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
"""A reader may still use it; only a forced removal takes it."""
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
"""The owner of the bytes does not answer, or lengths differ."""
MASTER_SILENT = -901
MASTER_LOST = (-900, MASTER_SILENT)
"""The master is away, or does not answer in time."""
GIVEN_UP = -1997
"""Ours: a transfer failed near the library's limit, and may still go on."""
NO_TIME = -1998
"""Ours, not the library's: the deadline passed before the call."""
NO_ANSWER = -1999
"""Ours, not the library's: it did not answer for every key."""


@attrs.frozen
class Code:
    """One number of the library."""

    outcome: Outcome
    sentence: str


_CODES = MappingProxyType(
    {
        -1: Code(Outcome.UNAVAILABLE, "internal error, or no connection"),
        -10: Code(Outcome.ERROR, "buffer overflow"),
        -100: Code(Outcome.UNAVAILABLE, "no segment is available"),
        -101: Code(Outcome.UNAVAILABLE, "the segment is gone"),
        -102: Code(Outcome.ERROR, "the segment exists already"),
        NO_ROOM: Code(Outcome.REFUSED, "no segment has room for it"),
        -300: Code(
            Outcome.UNAVAILABLE, "the master and this library are of other releases"
        ),
        -400: Code(Outcome.ERROR, "invalid key"),
        -500: Code(Outcome.ERROR, "the write failed"),
        BAD_ARGUMENTS: Code(Outcome.ERROR, "invalid arguments, or the store is shut"),
        -601: Code(Outcome.UNAVAILABLE, "the master does not know this client"),
        -700: Code(Outcome.ERROR, "invalid write"),
        -701: Code(Outcome.ERROR, "invalid read"),
        -702: Code(Outcome.ERROR, "invalid replica"),
        NOT_READY: Code(Outcome.ABSENT, "another writer is not done with it"),
        NOT_FOUND: Code(Outcome.ABSENT, "there is no such object"),
        EXISTS: Code(Outcome.OK, "it is there already"),
        LEASED: Code(Outcome.REFUSED, "a reader holds a lease on it"),
        LEASE_EXPIRED: Code(
            Outcome.TIMEOUT,
            "its lease ran out before the read had ended: raise the master's "
            "-default_kv_lease_ttl, and lease_s with it",
        ),
        TRANSFER_FAILED: Code(Outcome.UNAVAILABLE, "the transfer failed"),
        -801: Code(Outcome.CORRUPT, "the library's own checksum differs"),
        -900: Code(Outcome.UNAVAILABLE, "a call to the master failed"),
        MASTER_SILENT: Code(Outcome.UNAVAILABLE, "the master did not answer in time"),
        -1010: Code(Outcome.UNAVAILABLE, "the master cannot do this now"),
        -1011: Code(Outcome.ERROR, "the master runs in another mode"),
        -1012: Code(Outcome.ERROR, "the master does not support this"),
        -1300: Code(Outcome.ERROR, "SSD offload is on here but off in the master"),
        GIVEN_UP: Code(
            Outcome.UNAVAILABLE, "the transfer was given up and may still end"
        ),
        NO_TIME: Code(Outcome.TIMEOUT, "the deadline passed first"),
        NO_ANSWER: Code(Outcome.ERROR, "the library did not answer for every key"),
    }
)

_NOTHING_MOVED = (NO_ROOM, -400, BAD_ARGUMENTS, NOT_READY, NOT_FOUND, EXISTS, LEASED)
"""Answers of the master alone: no transfer has begun."""

_LOWEST = -2000
_OUTCOMES = np.full(1 - _LOWEST, Outcome.ERROR, np.uint8)
_OUTCOMES[0] = Outcome.OK
for _number, _code in _CODES.items():
    _OUTCOMES[-_number] = _code.outcome
_OUTCOMES.flags.writeable = False


def outcomes_of(numbers: Int64Array) -> OutcomeArray:
    """Return the outcome of each number; 0 and above is OK.

    Args:
        numbers: int64 (n,), as the library returned them.
    """
    return _OUTCOMES[np.clip(-numbers, 0, -_LOWEST)]


def given_up(numbers: Int64Array) -> Int64Array:
    """Return what the numbers of a call mean that lasted to the library's limit.

    Args:
        numbers: int64 (n,), as the library returned them.
    """
    unsure = (numbers < 0) & ~np.isin(numbers, _NOTHING_MOVED)
    return np.where(unsure, GIVEN_UP, numbers)


def sentence_of(number: int) -> str:
    """Say what a number means, with the number itself."""
    known = _CODES.get(number)
    return f"{known.sentence if known else 'unknown error'} ({number})"
