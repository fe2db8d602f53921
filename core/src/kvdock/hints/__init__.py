"""Hints that travel with a request: what to keep, to let go, and to bring near.

Engines carry an envelope of actions with a request and leave it to storage. `Hints`
reads it, applies it to the pages that are stored, and says for those that the request
stores later how long they are kept. It knows no engine: an adapter names the pages.
"""

from kvdock.hints.envelope import (
    MOST_BYTES,
    Hint,
    RequestHints,
    payload_schemas,
    read_envelope,
)
from kvdock.hints.service import Hints, PagesOfPool, by_times

__all__ = (
    "MOST_BYTES",
    "Hint",
    "Hints",
    "PagesOfPool",
    "RequestHints",
    "by_times",
    "payload_schemas",
    "read_envelope",
)
