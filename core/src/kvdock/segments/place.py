"""Where a store is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from kvdock.segments.ownership import Tenure


def _distinct(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(sizes))


@attrs.frozen(kw_only=True)
class Place:
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
    tenure: Tenure = attrs.field(default=Tenure.LOCKS, converter=Tenure)
