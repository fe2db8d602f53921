"""How much a namespace may take, and what an object takes of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from kvdock.errors import SettingsError
from kvdock.segments.format import index_bytes
from kvdock.segments.ownership import WriterLiveness

LEAST_SEGMENTS = 12
"""Segments of a quota: one of them is what eviction takes at once."""


MOST_SLOTS = 1 << 16
"""Slots of the largest segment."""


def _distinct(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(sizes))


@attrs.frozen(kw_only=True)
class StoreLocation:
    """Where the objects of one pool of one namespace are kept.

    Args:
        root: The store's root directory; made if it is missing.
        namespace: Digest of the namespace: a folder's name, and what every
            key begins with.
        pool: Name of the pool.
        object_bytes: Sizes of the pool's objects.
        record: What the namespace covers: the bytes behind the digest.
        shared: Accept a root that others own or may write.
        tenure: How it is told that the writer of a segment lives.
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


@attrs.frozen(kw_only=True)
class StoreLimits:
    """How much a namespace may take.

    Args:
        quota_bytes: Most bytes of all its pools; 0 for no quota.
        high_watermark: Share of the quota at which old pages begin to go.
        low_watermark: Share of the quota that pages take once they have gone.
        free_bytes: Space that the file system keeps free.
        segment_bytes: Size of a segment; smaller where space is short.
    """

    quota_bytes: int = 0
    high_watermark: float = 1.0
    low_watermark: float = 0.95
    free_bytes: int = 0
    segment_bytes: int = 256 << 20

    @property
    def high_bytes(self) -> int:
        """Bytes of the quota at which old pages begin to go; 0 for no quota."""
        return int(self.quota_bytes * self.high_watermark)

    def check(self, object_bytes: int, alignment: int) -> None:
        """Refuse a quota that not even one object fits in.

        Args:
            object_bytes: Size of the largest object.
            alignment: The engine's.

        Raises:
            SettingsError: If there is a quota, and it is too small.
        """
        least = least_bytes(object_bytes, alignment)
        if self.quota_bytes and self.high_bytes < least:
            raise SettingsError(
                f"a quota of {self.quota_bytes} bytes has no room for one object of "
                f"{object_bytes} bytes",
                fix=f"Give at least {least} bytes below the high watermark, and "
                f"some {LEAST_SEGMENTS} times as much for eviction to work well.",
            )


def slot_bytes_of(object_bytes: int, alignment: int) -> int:
    """Return the bytes from one slot to the next.

    Args:
        object_bytes: Size of the objects.
        alignment: The engine's.
    """
    return -(-object_bytes // alignment) * alignment


def least_bytes(object_bytes: int, alignment: int) -> int:
    """Return what the smallest segment takes, with its index file.

    Args:
        object_bytes: Size of its objects.
        alignment: The engine's.
    """
    return slot_bytes_of(object_bytes, alignment) + index_bytes(1)
