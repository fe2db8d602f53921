"""What a backend offers to `kvdock store`: what it keeps, seen without an engine.

A distribution announces a function under the group `kvdock.stores`, with the
name of its backend:

    [project.entry-points."kvdock.stores"]
    example = "kvdock_example.store:open_store"

The function takes what the user named (a directory, a URL) and the backend's
settings, and returns a `Store`, or None if that is none of its own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvdock.batch import Outcome
from kvdock.errors import PoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


GROUP = "kvdock.stores"


@attrs.frozen(kw_only=True)
class PoolSurvey:
    """Contents of one pool, for objects of one size.

    Args:
        pool: Name of the pool.
        object_bytes: Size of the objects.
        segments: Segments that can be read.
        pages: Objects in them.
        stored_bytes: Bytes of those objects.
        file_bytes: Bytes of all files, free slots and leftovers among them.
        corrupt_records: Records that are not whole.
    """

    pool: str
    object_bytes: int
    segments: int
    pages: int
    stored_bytes: int
    file_bytes: int
    corrupt_records: int


@attrs.frozen(kw_only=True)
class NamespaceSurvey:
    """Contents of one namespace.

    Args:
        namespace: Its digest.
        model: Identity of the model, "" where it is not recorded.
        revision: Which weights, as recorded.
        recorded: Whether its record is stored and matches its digest.
        used_ns: When any of its pages was last stored or read; 0 for never.
        pools: Its pools.
    """

    namespace: str
    model: str
    revision: str
    recorded: bool
    used_ns: int
    pools: tuple[PoolSurvey, ...]

    @property
    def pages(self) -> int:
        """Objects of all pools."""
        return sum(pool.pages for pool in self.pools)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(pool.file_bytes for pool in self.pools)


class DamagedPage(Protocol):
    """An object whose bytes are not those that were stored."""

    @property
    def where(self) -> str:
        """Return where it lies, for people."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes it has."""


class Verified(Protocol):
    """What became of reading every page of a namespace."""

    @property
    def namespace(self) -> str:
        """Its digest."""

    @property
    def good(self) -> int:
        """Pages whose bytes are those that were stored."""

    @property
    def bad(self) -> Sequence[DamagedPage]:
        """Pages whose bytes are not: a read of them is a miss."""

    @property
    def corrupt_records(self) -> int:
        """Pages that are lost because their record is."""

    @property
    def unreadable_segments(self) -> Sequence[object]:
        """Files that cannot be read; what they held is lost."""

    @property
    def damaged_files(self) -> Sequence[object]:
        """Return what else cannot be used, such as a record that does not match."""

    @property
    def forgotten(self) -> int:
        """Return how many of them were erased."""

    @property
    def failed_slots(self) -> int:
        """Places that could not be written and are set aside; they hold no page."""

    @property
    def ok(self) -> bool:
        """Return whether nothing was wrong."""


class Store(Protocol):
    """What one place holds, namespace by namespace.

    Every method may be called beside engines that use the place, and raises a
    `KvdockError` that says what to do where it cannot do its work.
    """

    def namespaces(self) -> Sequence[str]:
        """Return the digests of the namespaces, sorted."""

    def record(self, namespace: str) -> Mapping[str, object]:
        """Return the record of a namespace; empty if none is there that fits."""

    def finder(self, namespace: str) -> Callable[[Sequence[str]], Sequence[bool]]:
        """Return what says which of some keys are stored, as the store is now."""

    def survey(self, namespace: str) -> NamespaceSurvey:
        """Count what is held of a namespace."""

    def verify(
        self,
        namespace: str,
        progress: Callable[[int], None] | None = None,
        *,
        heal: bool = False,
    ) -> Verified:
        """Read every page of a namespace and compare its checksum.

        Args:
            namespace: Its digest.
            progress: Called with the bytes that were read since its last call.
            heal: Delete what is wrong, so that the next write stores it.
        """

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete what no process can read, and pages if asked to.

        Args:
            namespace: Its digest.
            to_bytes: Most that the namespace may keep.
            older_s: Delete pages that are older than this.
            newer: Delete also what a later version of kvdock has stored.

        Returns:
            The bytes that were freed.
        """

    def in_use(self, namespace: str) -> str:
        """Say why a process may have a namespace open; "" if none has."""

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        """Delete all pages of a namespace; return the bytes that were freed.

        Args:
            namespace: Its digest.
            unused: Raise instead if a process may have it open.
        """


def verify_object(key: str, data: Any) -> Outcome:  # noqa: ANN401 - any buffer
    """Compare an object's bytes with the trailer that the core put behind them.

    Args:
        key: The object's whole key.
        data: All of its bytes, trailer included, as one buffer.

    Returns:
        OK, CORRUPT, or SHORT or LONG where the trailer gives another length.
        An object without bytes marks its presence and is always OK.
    """
    # A listing of stores needs no numpy.
    import numpy as np  # noqa: PLC0415
    import xxhash  # noqa: PLC0415

    from kvdock.pools.objects import TRAILER_BYTES  # noqa: PLC0415
    from kvdock.transfer.integrity import (  # noqa: PLC0415
        TRAILER,
        compare_trailers,
        make_trailers,
    )

    found = np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)
    if not len(found):
        return Outcome.OK
    if len(found) < TRAILER_BYTES:
        return Outcome.SHORT
    body, tail = found[:-TRAILER_BYTES], found[-TRAILER_BYTES:]
    digest = np.array([xxhash.xxh3_64_intdigest(body.data)], np.uint64)
    wanted = make_trailers([key], len(body), digest)
    return Outcome(int(compare_trailers(tail.copy().view(TRAILER), wanted)[0]))


def pool_of_key(key: str) -> str:
    """Return the pool that the core's suffix of a key names, or "?"."""
    from kvdock.pools.objects import Coordinate  # noqa: PLC0415 - as above

    coordinate = key.rpartition("/")[2].partition(".")[2]
    with suppress(PoolError):
        return Coordinate.parse(coordinate).pool
    return "?"
