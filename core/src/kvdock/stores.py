"""What a backend offers to `kvdock store`: what it keeps, seen without an engine.

A distribution announces a function under the group `kvdock.stores`, with the
name of its backend:

    [project.entry-points."kvdock.stores"]
    example = "kvdock_example.store:open_store"

The function takes what the user named (a directory, a URL) and the backend's
settings, and returns a `Store`, or None if that is none of its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

from kvdock.batch import Outcome
from kvdock.errors import KvdockError, PoolError
from kvdock.generations import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvdock.capacity import TenantUse
    from kvdock.config.tenants import Tenants
    from kvdock.retention import Retention, RetentionAnswer


log = logging.getLogger("kvdock")

GROUP = "kvdock.stores"


@attrs.frozen(kw_only=True)
class PoolSurvey:
    """Contents of one pool, for objects of one size.

    Args:
        segments: Segments that can be read.
        pages: Objects in them.
        stored_bytes: Bytes of those objects.
        file_bytes: Bytes of all files, free slots and leftovers among them.
        corrupt_records: Records that are not whole.
        promised_bytes: Bytes of objects that are promised now.
        expiring: Objects that have a time from which on they are not served.
    """

    pool: str
    object_bytes: int
    segments: int
    pages: int
    stored_bytes: int
    file_bytes: int
    corrupt_records: int
    promised_bytes: int = 0
    expiring: int = 0


@attrs.frozen(kw_only=True)
class NamespaceSurvey:
    """Contents of one namespace.

    Args:
        model: Identity of the model, "" where it is not recorded.
        revision: Which weights, as recorded.
        generation: Their generation for people, if they were replaced at run time.
        recorded: Whether its record is stored and matches its digest.
        used_ns: When any of its pages was last stored or read; 0 for never.
    """

    namespace: str
    model: str
    revision: str
    recorded: bool
    used_ns: int
    pools: tuple[PoolSurvey, ...]
    generation: str = ""

    @property
    def pages(self) -> int:
        """Objects of all pools."""
        return sum(pool.pages for pool in self.pools)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(pool.file_bytes for pool in self.pools)

    @property
    def promised_bytes(self) -> int:
        """Bytes of all pools that are promised now."""
        return sum(pool.promised_bytes for pool in self.pools)

    @property
    def expiring(self) -> int:
        """Objects of all pools that have a time."""
        return sum(pool.expiring for pool in self.pools)


class DamagedPage(Protocol):
    """An object whose bytes are not those that were stored."""

    @property
    def where(self) -> str:
        """Return where it lies, for people."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes it has."""


@attrs.frozen(kw_only=True)
class Verified:
    """The result of reading every page of a namespace.

    Args:
        good: Pages whose bytes are those that were stored.
        bad: Pages whose bytes are not: a read of them is a miss.
        corrupt_records: Records that are not whole, or whose pages lie beyond the
            end of their file: those pages are lost.
        unreadable_segments: Index files that cannot be read, or without a file of
            pages: what they held is lost.
        damaged_files: What the namespace holds besides its pools and cannot be
            used, a record that does not fit the digest, say; and files of pages
            that are one file under several names.
        forgotten: Bad pages and wrong records that were erased.
        failed_slots: Places that could not be written when it was last tried. They
            hold no page and are set aside; many of them mean a failing disk.
    """

    namespace: str
    good: int
    bad: Sequence[DamagedPage] = ()
    corrupt_records: int = 0
    unreadable_segments: Sequence[Path] = ()
    damaged_files: Sequence[Path] = ()
    forgotten: int = 0
    failed_slots: int = 0

    @property
    def ok(self) -> bool:
        """Return whether nothing was wrong."""
        lost = self.bad or self.corrupt_records or self.unreadable_segments
        return not (lost or self.damaged_files)


@attrs.frozen(kw_only=True)
class StoredPage:
    """One object of a page, as it is copied from store to store.

    Args:
        key: Its whole key; "" where the store keeps only a digest of it.
        digest: That digest, 16 bytes; b"" where the store has the key.
        nbytes: Its bytes, trailer included.
        used_ns: When it was last stored or, as far as is known, read.
        read: Returns its bytes, verified; None if they are wrong or gone.
        tenant: Number of the tenant that it was stored for; 0 for none.
    """

    key: str = ""
    digest: bytes = b""
    pool: str
    nbytes: int
    used_ns: int
    read: Callable[[], bytes | None] = attrs.field(repr=False)
    tenant: int = 0


class PageReceiver(Protocol):
    """What takes copied objects of one namespace."""

    def has(self, page: StoredPage) -> bool:
        """Return whether an object is there."""

    def take(self, page: StoredPage, data: bytes) -> bool:
        """Store an object; return whether it can be read again, right."""

    def retain(
        self, pages: Sequence[StoredPage], asked: Retention
    ) -> Mapping[RetentionAnswer, int]:
        """Promise stored objects, or let them expire; return the answers."""

    def delete(self, pages: Sequence[StoredPage]) -> Sequence[StoredPage]:
        """Delete objects, for all that use the place; return those that stay."""


@runtime_checkable
class TenantStore(Protocol):
    """What a store is as well that knows what each tenant takes."""

    def room(self, tenants: Tenants) -> Mapping[str, TenantUse]:
        """Count what listed tenants take, and `default`, in all namespaces."""


class Store(Protocol):
    """What one place holds, namespace by namespace.

    Every method may be called beside engines that use the place, and raises a
    `KvdockError` that says what to do where it cannot do its work.
    """

    def namespaces(self) -> Sequence[str]:
        """Return the digests of the namespaces, sorted."""

    def now_ns(self) -> int:
        """Return the time by the clock that dates the pages, in ns since 1970.

        Ages are counted from it: this host's own clock may be wrong.
        """

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

        `progress` is called with the bytes that were read since its last call. What is
        wrong is deleted if `heal`, so that the next write stores it.
        """

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete what no process can read, and pages if asked; return the bytes freed.

        `to_bytes` is the most that the namespace may keep; pages older than `older_s`
        go, and if `newer` what a later version of kvdock has stored.
        """

    def pages(
        self, namespace: str, keys: Sequence[str] = (), *, expiring: bool = False
    ) -> Iterator[StoredPage]:
        """Yield the objects of a namespace.

        Args:
            namespace: Its digest.
            keys: Whole keys that are known: where the store keeps digests only, an
                object of one of them has its key.
            expiring: Those that expire as well; a copy of one would not.
        """

    def receive(
        self, namespace: str, record: bytes
    ) -> AbstractContextManager[PageReceiver]:
        """Open the store, new or not, for objects that are copied to it.

        `record` is what the digest is of; b"" if it is not known.
        """

    @property
    def shows_users(self) -> bool:
        """Whether `in_use` knows which processes have a namespace open."""

    def in_use(self, namespace: str) -> str:
        """Say why a process may have a namespace open; "" if none has."""

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        """Delete all pages of a namespace; return the bytes that were freed.

        If `unused`, raise instead where a process may have it open.
        """


def verify_object(key: str, data: Any) -> Outcome:  # noqa: ANN401 - any buffer
    """Compare an object's bytes with the trailer that the core put behind them.

    Args:
        key: The object's whole key.
        data: All of its bytes, trailer included, as one buffer.

    Returns:
        OK, CORRUPT, or SHORT or LONG where the trailer gives another length.
        An object without bytes marks its presence and is always OK. A sealed one is
        OK as well: only its key could say more, and no key is needed here.
    """
    # A listing of stores needs no numpy.
    import numpy as np  # noqa: PLC0415
    import xxhash  # noqa: PLC0415

    from kvdock.pools.objects import TRAILER_BYTES  # noqa: PLC0415
    from kvdock.transfer.integrity import (  # noqa: PLC0415
        TRAILER,
        compare_trailers,
        is_sealed,
        make_trailers,
    )

    found = np.frombuffer(data, np.uint8) if len(data) else np.zeros(0, np.uint8)
    if not len(found):
        return Outcome.OK
    if len(found) < TRAILER_BYTES:
        return Outcome.SHORT
    body, tail = found[:-TRAILER_BYTES], found[-TRAILER_BYTES:]
    if is_sealed(tail.tobytes()):
        return Outcome.OK
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


QUIET_S = 3600.0
"""How long nothing is stored in a namespace before it counts as unused, where a store
does not show who has it open. Engines that have lose pages, and store them again."""


def delete_former(
    store: Store,
    run: str,
    keep: int,
    *,
    left: Collection[str] = (),
    present: Collection[str] = (),
) -> int:
    """Delete generations of a store that are not needed; return the bytes freed.

    What a process may have open stays. Private ones go, as nothing can find them
    again, those of engines that were killed too; and of the run those that were used
    before the last `keep` versions.

    Args:
        store: Where they are.
        run: The run, or "" for none.
        keep: Versions of it that stay.
        left: Private namespaces that no process has open, also where the store does
            not show that.
        present: Namespaces that are open, also where the store does not show that.
    """
    quiet_ns = 0 if store.shows_users else store.now_ns() - int(QUIET_S * 1e9)
    versions: dict[Generation, int] = {}
    doomed: list[str] = []
    of_run: dict[str, tuple[Generation, bool]] = {}
    for namespace in store.namespaces():
        generation = Generation.of(store.record(namespace))
        if generation is None or namespace in present:
            continue
        if store.shows_users and store.in_use(namespace):
            continue
        if not generation.run:
            known = store.shows_users or namespace in left
            if known or store.survey(namespace).used_ns < quiet_ns:
                doomed.append(namespace)
        elif generation.run == run:
            used_ns = store.survey(namespace).used_ns
            of_run[namespace] = generation, store.shows_users or used_ns < quiet_ns
            versions[generation] = max(used_ns, versions.get(generation, 0))
    kept = sorted(versions, key=lambda one: versions[one], reverse=True)[:keep]
    doomed += [
        name
        for name, (generation, unused) in of_run.items()
        if unused and generation not in kept
    ]
    freed = 0
    for namespace in doomed:
        try:
            freed += store.clear(namespace, unused=store.shows_users)
            store.collect(namespace)
        except KvdockError as error:  # it was opened meanwhile, or is gone
            log.info("generation of namespace %s stays: %s", namespace[:12], error)
    return freed
