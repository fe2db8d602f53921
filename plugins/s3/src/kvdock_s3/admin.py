"""`kvdock store` on a bucket."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvdock import KvdockError, Outcome
from kvdock.config import structure
from kvdock.errors import NamespaceError
from kvdock.generations import Generation
from kvdock.namespace import decode_record, verify_record
from kvdock.retention import RetentionAnswer
from kvdock.stores import (
    NamespaceSurvey,
    PoolSurvey,
    StoredPage,
    Verified,
    pool_of_key,
    verify_object,
)
from kvdock_s3.attachment import MAX_RECORD_BYTES, store_record
from kvdock_s3.client import Entry, ObjectClient, RequestFailed, WrongLength
from kvdock_s3.layout import is_namespace, is_page, probe_name, record_name
from kvdock_s3.pool import DELETE_KEYS
from kvdock_s3.settings import S3Settings, names_a_service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.retention import Retention
    from kvdock.stores import PageReceiver, Store

REQUEST_S = 30.0
"""For one request; the work as a whole takes as long as there are objects."""

_RECORD_AGE_NS = 24 * 3600 * 10**9
"""How old a record without pages is before it goes: an engine may be at it."""


@attrs.frozen(kw_only=True)
class DamagedObject:
    """An object whose bytes are not those that were stored.

    Args:
        why: What is wrong with it, an outcome's name.
    """

    key: str
    nbytes: int
    why: str

    @property
    def where(self) -> str:
        """Its name and what is wrong with it, for people."""
        return f"{self.key} ({self.why.lower()})"


@attrs.frozen
class BucketStore:
    """The namespaces below a URL."""

    shows_users: ClassVar[bool] = False

    client: ObjectClient

    def namespaces(self) -> tuple[str, ...]:
        """Return the digests of the namespaces, sorted."""
        with self._asking("cannot be listed"):
            found = self.client.folders(_deadline_s())
        return tuple(sorted(filter(is_namespace, found)))

    def now_ns(self) -> int:
        """Return the server's time, from an object that is stored for it."""
        name = probe_name()
        try:
            with self._asking("no object can be stored to see the server's time"):
                self.client.put(name, [b"now"], _deadline_s(), replace=True)
                return _modified_ns(self.client.head(name, _deadline_s()))
        finally:
            with suppress(RequestFailed):
                self.client.delete_one(name, _deadline_s())

    def record(self, namespace: str) -> Mapping[str, object]:
        """Return the record of a namespace; empty if none is there that fits."""
        with suppress(RequestFailed, WrongLength, NamespaceError):
            data = self.client.read(
                record_name(namespace), _deadline_s(), MAX_RECORD_BYTES
            )
            record = decode_record(data)
            verify_record(record, namespace)
            return record
        return {}

    def finder(self, namespace: str) -> Callable[[Sequence[str]], Sequence[bool]]:
        """Return what says which of some keys are stored, as the store is now."""
        names = {page.name for page in self._pages(namespace)}
        return lambda keys: [key in names for key in keys]

    def survey(self, namespace: str) -> NamespaceSurvey:
        """Count what is held of a namespace."""
        about = self.record(namespace)
        pages = list(self._pages(namespace))
        totals = Counter((pool_of_key(page.name), page.nbytes) for page in pages)
        return NamespaceSurvey(
            namespace=namespace,
            model=str(about.get("model", "")),
            revision=str(about.get("revision", "")),
            generation=str(Generation.of(about) or ""),
            recorded=bool(about),
            used_ns=max(map(_modified_ns, pages), default=0),
            pools=tuple(
                PoolSurvey(
                    pool=pool,
                    object_bytes=nbytes,
                    segments=0,
                    pages=count,
                    stored_bytes=count * nbytes,
                    file_bytes=count * nbytes,
                    corrupt_records=0,
                )
                for (pool, nbytes), count in sorted(totals.items())
            ),
        )

    def pages(
        self, namespace: str, keys: Sequence[str] = (), *, expiring: bool = False
    ) -> Iterator[StoredPage]:
        """Yield the objects of a namespace; `keys` are not needed."""
        del keys, expiring  # their times are in their trailers, and stay there
        for page in self._pages(namespace):
            yield StoredPage(
                key=page.name,
                pool=pool_of_key(page.name),
                nbytes=page.nbytes,
                used_ns=_modified_ns(page),
                read=partial(self._verified, page.name, page.nbytes),
            )

    @contextmanager
    def receive(self, namespace: str, record: bytes) -> Iterator[PageReceiver]:
        """Write the namespace's record, and take objects with known keys."""
        if record:
            store_record(self.client, record_name(namespace), record, _deadline_s())
        yield self

    def has(self, page: StoredPage) -> bool:
        """Return whether an object is there."""
        if not page.key:
            raise KvdockError(
                "a bucket keeps objects under their keys, and the source keeps none",
                fix="Name pages with --hashes FILE, a key or its end on each line.",
            )
        with suppress(RequestFailed):
            return self.client.head(page.key, _deadline_s()).nbytes == page.nbytes
        return False

    def retain(
        self, pages: Sequence[StoredPage], asked: Retention
    ) -> Mapping[RetentionAnswer, int]:
        """Answer that a bucket changes no times."""
        del asked
        return {RetentionAnswer.UNSUPPORTED: len(pages)}

    def delete(self, pages: Sequence[StoredPage]) -> list[StoredPage]:
        """Delete objects; return those that stay, which are none."""
        self._delete([page.key for page in pages])
        return []

    def take(self, page: StoredPage, data: bytes) -> bool:
        """Store an object; return whether it can be read again, right."""
        with self._asking(f"{page.key} cannot be stored"):
            self.client.put(page.key, [data], _deadline_s(), replace=True)
        return self._verified(page.key, page.nbytes) == data

    def _verified(self, key: str, nbytes: int) -> bytes | None:
        with suppress(RequestFailed, WrongLength):
            data = bytes(self.client.get(key, nbytes, _deadline_s()))
            return data if verify_object(key, data) is Outcome.OK else None
        return None

    def verify(
        self,
        namespace: str,
        progress: Callable[[int], None] | None = None,
        *,
        heal: bool = False,
    ) -> Verified:
        """Read every page of a namespace and compare its trailer.

        Pages that were stored with `core.integrity = "off"` have none.
        """
        good, bad = 0, list[DamagedObject]()
        pages = list(self._pages(namespace))
        threads = ThreadPoolExecutor(self.client.settings.threads, "kvdock-s3-verify")
        try:
            found = threads.map(self._check, pages)
            for page, outcome in zip(pages, found, strict=True):
                good += outcome is Outcome.OK
                if outcome not in (Outcome.OK, Outcome.ABSENT):
                    bad.append(
                        DamagedObject(
                            key=page.name, nbytes=page.nbytes, why=outcome.name
                        )
                    )
                if progress:
                    progress(page.nbytes)
        finally:
            # An interrupt waits for the requests under way alone.
            threads.shutdown(wait=False, cancel_futures=True)
        if heal:
            self._delete([one.key for one in bad])
        return Verified(
            namespace=namespace,
            good=good,
            bad=tuple(bad),
            forgotten=len(bad) if heal else 0,
        )

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete pages by their age, and the record of a namespace without any.

        A bucket knows when an object was stored, and not when it was read. Ages are
        by its own clock.
        """
        del newer
        pages = sorted(self._pages(namespace), key=lambda page: page.modified)
        keeps = sum(page.nbytes for page in pages)
        before_ns = 0 if older_s is None else self.now_ns() - int(older_s * 1e9)
        going = []
        for page in pages:
            old = _modified_ns(page) < before_ns
            if not old and (to_bytes is None or keeps <= to_bytes):
                break
            going.append(page)
            keeps -= page.nbytes
        self._delete([page.name for page in going])
        if len(going) == len(pages):
            self._drop_record(namespace)
        return sum(page.nbytes for page in going)

    def in_use(self, namespace: str) -> str:
        """Say that a bucket does not show which process has a namespace open."""
        del namespace
        return "a bucket does not show who has it open"

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        """Delete all pages of a namespace; return the bytes that were freed."""
        if unused:
            raise KvdockError(
                f"namespace {namespace[:12]} is kept: {self.in_use(namespace)}"
            )
        pages = list(self._pages(namespace))
        self._delete([page.name for page in pages])
        return sum(page.nbytes for page in pages)

    def _pages(self, namespace: str) -> Iterator[Entry]:
        with self._asking("cannot be listed"):
            for part in self.client.entries(namespace, _deadline_s):
                yield from (one for one in part if is_page(one.name))

    def _check(self, page: Entry) -> Outcome:
        """Compare an object with its trailer; ABSENT if it went meanwhile."""
        what = f"{page.name} cannot be read"
        # One of another length was replaced since it was listed.
        with suppress(WrongLength), self._asking(what, or_absent=True):
            data = self.client.get(page.name, page.nbytes, _deadline_s())
            return verify_object(page.name, data)
        return Outcome.ABSENT

    def _delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), DELETE_KEYS):
            with self._asking("objects cannot be deleted"):
                self.client.delete(names[start : start + DELETE_KEYS], _deadline_s())

    def _drop_record(self, namespace: str) -> None:
        name = record_name(namespace)
        # Without permission to store, its age is not known and it stays.
        with suppress(RequestFailed, KvdockError):
            entry = self.client.head(name, _deadline_s())
            if self.now_ns() - _modified_ns(entry) > _RECORD_AGE_NS:
                self.client.delete_one(name, _deadline_s())

    @contextmanager
    def _asking(self, what: str, *, or_absent: bool = False) -> Iterator[None]:
        """Make requests, and say what could not be done where one fails.

        With `or_absent`, an object that is not there ends the block and no more.
        """
        try:
            yield
        except RequestFailed as failed:
            if not (or_absent and failed.failure.outcome is Outcome.ABSENT):
                raise KvdockError(
                    f"{self.client.settings.url}: {what}: {failed.failure.sentence}",
                    fix="`kvdock doctor s3` says what is missing.",
                ) from failed


def open_store(target: str, settings: Mapping[str, object]) -> Store | None:
    """Open a bucket by its URL; None for one of another service, or a directory.

    Entry point `s3` of the group `kvdock.stores`.

    Raises:
        KvdockError: If a setting is wrong.
    """
    if not names_a_service(target):
        return None
    given = {**settings, "url": target}
    return BucketStore(ObjectClient(structure(S3Settings, given, where="backend 's3'")))


def _modified_ns(entry: Entry) -> int:
    return int(entry.modified.timestamp() * 1e9)


def _deadline_s() -> float:
    return time.monotonic() + REQUEST_S
