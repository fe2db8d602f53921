"""Requests to one bucket, each within the time that is left for it.

The library's timeouts belong to a client and not to a request. So there is a
client for each of a few amounts of time, made when it is first needed: a
request goes through the one whose worst case still fits.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import obstore

from kvdock import Outcome
from kvdock_s3.connect import open_store
from kvdock_s3.outcomes import Failure, explain
from kvdock_s3.process_guard import GUARD

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from kvdock_s3.settings import S3Settings

T = TypeVar("T")

_STEPS = 22
_TIMES_S = tuple(0.05 * 2 ** (step / 2) for step in range(_STEPS))
"""50 ms to 72 s: the next smaller one leaves at least 70 % of the time."""

_CONNECT_SHARE = 0.5
_HOLD_OFF_S = 1.0
"""How long no connection is tried after one that took its whole timeout.

The first batch pays the timeout, and those behind it are answered at once
until the core's breaker is open. It probes after a second or later.
"""

LIST_PAGE_KEYS = 1000


class RequestFailed(Exception):  # noqa: N818 - what happened
    """One request did not succeed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.sentence)
        self.failure = failure


class WrongLength(Exception):  # noqa: N818 - what happened
    """An object has another length than the memory for it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"the object has {nbytes} bytes")
        self.nbytes = nbytes


@attrs.frozen
class Entry:
    """One object of a listing.

    Args:
        name: Its name below the prefix.
    """

    name: str
    nbytes: int
    modified: datetime


_NO_TIME = Failure(Outcome.TIMEOUT, "the deadline passed first")
_CLOSED = Failure(Outcome.UNAVAILABLE, "the client is closed")
_HELD_OFF = Failure(
    Outcome.UNAVAILABLE,
    "no connection came about a moment ago",
    unreachable=True,
)


class ObjectClient:
    """One bucket and prefix; any number of threads may use it at once.

    Raises:
        KvdockError: In a child that was forked after the library was used.
    """

    def __init__(self, settings: S3Settings) -> None:
        GUARD.enter()
        self.settings = settings
        self._stores: dict[int, ObjectStore] = {}
        self._lock = threading.Lock()
        self._resumes_at = 0.0
        self._closed = False

    def put(
        self,
        name: str,
        pieces: Sequence[Any],
        deadline_s: float,
        *,
        replace: bool = False,
    ) -> None:
        """Store an object whose bytes lie in pieces of memory.

        The memory is read until this returns, and never copied.

        Args:
            name: The object, below the prefix.
            pieces: Flat uint8 buffers.
            deadline_s: When to give up, on `time.monotonic()`'s clock.
            replace: Whether an object of that name may be replaced.

        Raises:
            RequestFailed: If it is not known to be stored; with outcome OK if
                one of that name was there already.
        """
        once = not replace and self.settings.conditional_put
        if not (replace or once) and self._is_there(name, deadline_s):
            return

        def request(store: ObjectStore) -> object:
            return obstore.put(
                store,
                name,
                pieces,
                mode="create" if once else "overwrite",
                use_multipart=False,
            )

        self._call(request, deadline_s)

    def _is_there(self, name: str, deadline_s: float) -> bool:
        try:
            self.head(name, deadline_s)
        except RequestFailed as failed:
            if failed.failure.outcome is Outcome.ABSENT:
                return False
            raise
        return True

    def get(self, name: str, nbytes: int, deadline_s: float) -> Any:  # noqa: ANN401 - a buffer of the library
        """Return the bytes of an object in a buffer of its own.

        Raises:
            WrongLength: If it has another length.
            RequestFailed: If it cannot be read.
        """

        def request(store: ObjectStore) -> object:
            # Not get_range: of a longer object it returns a part, and no error.
            found = obstore.get(store, name)
            size = found.meta["size"]
            if size != nbytes:
                raise WrongLength(size)
            return found.bytes()

        data = self._call(request, deadline_s)
        if len(cast("Any", data)) != nbytes:
            raise WrongLength(len(cast("Any", data)))
        return data

    def head(self, name: str, deadline_s: float) -> Entry:
        """Look at an object without its bytes."""
        return _entry(self._call(lambda store: obstore.head(store, name), deadline_s))

    def read(self, name: str, deadline_s: float, most_bytes: int) -> bytes:
        """Return the bytes of an object of unknown length.

        Raises:
            WrongLength: If it has more than `most_bytes`.
            RequestFailed: If it cannot be read.
        """

        def request(store: ObjectStore) -> bytes:
            found = obstore.get(store, name)
            if found.meta["size"] > most_bytes:
                raise WrongLength(found.meta["size"])
            return bytes(found.bytes())

        return self._call(request, deadline_s)

    def delete(self, names: Sequence[str], deadline_s: float) -> None:
        """Delete objects; those that are not there are no failure."""
        if self.settings.bulk_delete:
            try:
                self._call(lambda store: obstore.delete(store, list(names)), deadline_s)
            except RequestFailed as failed:
                # Azure minds one that is not there, and says no more of the rest.
                if failed.failure.outcome is not Outcome.ABSENT:
                    raise
            else:
                return
        for name in names:
            self.delete_one(name, deadline_s)

    def delete_one(self, name: str, deadline_s: float) -> None:
        """Delete one object; it need not be there."""
        try:
            self._call(lambda store: obstore.delete(store, name), deadline_s)
        except RequestFailed as failed:
            # S3 does not mind, GCS and Azure do.
            if failed.failure.outcome is not Outcome.ABSENT:
                raise

    def entries(
        self, folder: str, deadline_s: Callable[[], float]
    ) -> Iterator[list[Entry]]:
        """List what lies below a folder, page by page.

        Args:
            folder: Whole words of a path, without a slash at the end.
            deadline_s: Called for the deadline of each page.
        """
        listing = self._call(
            lambda store: iter(
                obstore.list(store, folder or None, chunk_size=LIST_PAGE_KEYS)
            ),
            deadline_s(),
        )
        while True:
            page = self._call(lambda _: next(listing, None), deadline_s())
            if page is None:
                return
            yield [_entry(one) for one in page]

    def folders(self, deadline_s: float) -> list[str]:
        """Return the names of the folders right below the prefix."""
        found = self._call(
            lambda store: obstore.list_with_delimiter(store, None), deadline_s
        )
        return [str(name) for name in found["common_prefixes"]]

    def close(self) -> None:
        """Close the connections; requests that are under way end by themselves."""
        with self._lock:
            self._closed = True
            self._stores.clear()

    def _call(self, request: Callable[[ObjectStore], T], deadline_s: float) -> T:
        GUARD.enter()
        begun_s = time.monotonic()
        if begun_s < self._resumes_at:
            raise RequestFailed(_HELD_OFF)
        step = bisect_right(_TIMES_S, deadline_s - begun_s) - 1
        if step < 0:
            raise RequestFailed(_NO_TIME)
        try:
            # Making a client may fail as well: an account or a certificate is missing.
            return request(self._stores.get(step) or self._open(step))
        except (WrongLength, RequestFailed):
            raise
        except Exception as error:
            failure = explain(error)
            if failure.unreachable:
                self._note_unreachable(step, time.monotonic() - begun_s)
            raise RequestFailed(failure) from error

    def _note_unreachable(self, step: int, took_s: float) -> None:
        """Hold off further requests where each would wait as long."""
        if took_s >= self._connect_s(step) * 0.9:
            self._resumes_at = time.monotonic() + _HOLD_OFF_S

    def _connect_s(self, step: int) -> float:
        return min(self.settings.connect_timeout, _TIMES_S[step] * _CONNECT_SHARE)

    def _open(self, step: int) -> ObjectStore:
        with self._lock:
            if self._closed:
                raise RequestFailed(_CLOSED)
            if step not in self._stores:
                self._stores[step] = open_store(
                    self.settings, _TIMES_S[step], self._connect_s(step)
                )
            return self._stores[step]


def _entry(found: Any) -> Entry:  # noqa: ANN401 - a mapping of the library
    return Entry(str(found["path"]), int(found["size"]), found["last_modified"])
