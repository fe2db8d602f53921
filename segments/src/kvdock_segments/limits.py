"""Where the objects of a pool are, and the least room that they need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from kvdock.config.tenants import Tenants
from kvdock.errors import SettingsError
from kvdock_segments.format import index_bytes
from kvdock_segments.ownership import WriterLiveness

LEAST_SEGMENTS = 12
"""Minimum number of segments of a quota; eviction takes one segment at a time."""


def _distinct(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(sizes))


@attrs.frozen(kw_only=True)
class StoreLocation:
    """Location of the objects of one pool of one namespace.

    Args:
        root: The store's root directory; created if it is missing.
        namespace: Digest of the namespace: a folder's name, and what every
            key begins with.
        record: The record of the namespace: the bytes whose digest it is.
        shared: Accept a root that other users own or can write.
        liveness: How other processes detect that the writer of a segment is alive.
        digests: Whether keys are not keys but their digests in hex, as records of
            another store have them.
        tenant: Number of the tenant that the namespace's salt belongs to; 0 for none.
        tenants: The listed tenants, with their quotas.
        max_age_s: How long pages are served that say no time; 0 for ever.
        erase_within_s: How soon after its time a page is overwritten.
    """

    root: Path
    namespace: str
    pool: str
    object_bytes: tuple[int, ...] = attrs.field(converter=_distinct)
    record: bytes = attrs.field(default=b"", repr=False)
    shared: bool = False
    liveness: WriterLiveness = attrs.field(
        default=WriterLiveness.LOCKS, converter=WriterLiveness
    )
    digests: bool = False
    tenant: int = 0
    tenants: Tenants = attrs.field(factory=Tenants, repr=False)
    max_age_s: float = 0.0
    erase_within_s: float = 60.0


def check_quota(quota: int, object_bytes: int, slot_bytes: int) -> None:
    """Reject a quota that is too small for one object.

    Raises:
        SettingsError: If there is a quota and it is too small.
    """
    least = least_bytes(slot_bytes)
    if quota and quota < least:
        raise SettingsError(
            f"a quota of {quota} bytes has no room for one object of {object_bytes} "
            "bytes",
            fix=f"Give at least {least} bytes, and some {LEAST_SEGMENTS} times as much "
            "for eviction to work well.",
        )


def least_bytes(slot_bytes: int) -> int:
    """Return what the smallest segment takes, with its index file."""
    return slot_bytes + index_bytes(1)
