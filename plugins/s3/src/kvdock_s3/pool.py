"""One attached pool: its batches as requests.

Each key is an object. A put is read from the engine's memory by the client
itself. A get arrives in memory of the client and is copied once, if its
length is right and the call has not been answered yet: what comes late never
reaches the engine's memory.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import Batch, BatchResult, KvdockError, Operation, Outcome
from kvdock.throttled_log import ThrottledLog
from kvdock_s3.client import ObjectClient, RequestFailed, WrongLength
from kvdock_s3.layout import MAX_KEY_BYTES, is_page
from kvdock_s3.process_guard import GUARD
from kvdock_s3.threads import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvdock_s3.outcomes import Failure
    from kvdock_s3.threads import RequestThreads

DELETE_KEYS = 1000
"""Most objects that one request deletes."""

_MAX_UNFIT = 1 << 16
_MARGIN_S = 0.002
"""Before the deadline, so that the answer itself is in time."""

_USUAL = (Outcome.OK, Outcome.ABSENT)


@attrs.define(eq=False)
class SharedClient:
    """A client, its threads, and how many pools use them."""

    client: ObjectClient
    threads: RequestThreads
    users: int = 0

    def release(self) -> None:
        """Take a pool's leave; the last one ends the threads."""
        self.users -= 1
        if not self.users:
            self.threads.close()
            self.client.close()


@attrs.define(eq=False)
class PoolHandle:
    """One pool of an attachment.

    Args:
        namespace: The digest that begins every key.
    """

    shared: SharedClient
    namespace: str
    # Keys whose object had another length. A conditional put would find it
    # there and believe it; theirs replaces it.
    _unfit: set[str] = attrs.field(factory=set, init=False)
    _complaints: ThrottledLog = attrs.field(factory=ThrottledLog, init=False)

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch."""
        GUARD.enter()
        if batch.operation is Operation.CLEAR:
            outcomes = [self._clear(prefix, batch.deadline_s) for prefix in batch.keys]
            return BatchResult.of(batch, np.array(outcomes, np.uint8))
        if batch.operation is Operation.DELETE and self._delete(batch):
            return BatchResult.all(batch, Outcome.OK)
        return self._requests(batch)

    def close(self) -> None:
        """Release the pool; the last one of an attachment ends its threads."""
        try:
            GUARD.enter()
        except KvdockError:
            # The parent's threads are not here to be ended.
            return
        self.shared.release()

    def _requests(self, batch: Batch) -> BatchResult:
        """Make one request for each key."""
        rows = _Rows.of(batch, self.shared.client, self._unfit, self._note)
        do = {
            Operation.EXISTS: rows.exists,
            Operation.PUT: rows.put,
            Operation.GET: rows.get,
            Operation.DELETE: rows.delete,
        }[batch.operation]
        job = Job(do, len(batch))
        self.shared.threads.start(job)
        # A put that has begun reads the engine's memory until it ends.
        reads = batch.operation is Operation.PUT
        job.wait(batch.deadline_s - _MARGIN_S, for_active=reads)
        return BatchResult.of(batch, rows.outcomes.copy())

    def _delete(self, batch: Batch) -> bool:
        """Delete many at once; false if each has to be asked for by itself."""
        if not self.shared.client.settings.bulk_delete:
            return False
        keys = list(batch.keys)
        if max(map(len, keys), default=0) > MAX_KEY_BYTES:
            return False
        try:
            for start in range(0, len(keys), DELETE_KEYS):
                part = keys[start : start + DELETE_KEYS]
                self.shared.client.delete(part, batch.deadline_s)
        except RequestFailed as failed:
            self._note("delete", failed.failure)
            return False
        self._unfit.difference_update(keys)
        return True

    def _clear(self, prefix: str, deadline_s: float) -> Outcome:
        """Delete the objects whose key begins with a prefix."""
        namespace, _, _ = prefix.partition("/")
        if namespace != self.namespace:
            return Outcome.REFUSED
        client = self.shared.client
        try:
            for page in client.entries(namespace, lambda: deadline_s):
                names = [
                    one.name
                    for one in page
                    if one.name.startswith(prefix) and is_page(one.name)
                ]
                if names:
                    client.delete(names, deadline_s)
        except RequestFailed as failed:
            self._note("clear", failed.failure)
            return failed.failure.outcome
        self._unfit.clear()
        return Outcome.OK

    def _note(self, what: str, failure: Failure) -> None:
        """Log a failure that is more than a miss, now and then."""
        if failure.outcome in _USUAL:
            return
        kind = failure.code or failure.status or failure.outcome.name
        self._complaints.warning(
            f"{what} {kind}", f"backend s3: {what} failed: {failure.sentence}"
        )


@attrs.define(eq=False)
class _Rows:
    """The rows of one batch, each of which is a request.

    It holds addresses and not the batch: requests that were left behind do
    not keep the caller's arrays alive.
    """

    client: ObjectClient
    keys: Sequence[str]
    addresses: list[list[int]]
    sizes: list[list[int]]
    deadline_s: float
    unfit: set[str]
    note: Callable[[str, Failure], None]
    outcomes: npt.NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        batch: Batch,
        client: ObjectClient,
        unfit: set[str],
        note: Callable[[str, Failure], None],
    ) -> _Rows:
        return cls(
            client,
            batch.keys,
            batch.addresses.tolist(),
            batch.sizes.tolist(),
            batch.deadline_s,
            unfit,
            note,
            np.full(len(batch), Outcome.TIMEOUT, np.uint8),
        )

    def exists(self, _: Job, row: int) -> None:
        """Look whether an object is there."""
        self._end(row, "head", lambda key: self.client.head(key, self.deadline_s))

    def put(self, _: Job, row: int) -> None:
        """Store an object from the engine's memory."""
        pieces = [
            _view(at, nbytes)
            for at, nbytes in zip(self.addresses[row], self.sizes[row], strict=True)
            if nbytes
        ]
        key = self.keys[row]
        replace = key in self.unfit
        self._end(
            row,
            "put",
            lambda key: self.client.put(key, pieces, self.deadline_s, replace=replace),
        )
        if replace and self.outcomes[row] == Outcome.OK:
            self.unfit.discard(key)

    def get(self, job: Job, row: int) -> None:
        """Load an object and copy it to the engine's memory."""
        sizes = self.sizes[row]

        def load(key: str) -> None:
            nbytes = sum(sizes)
            try:
                data = self.client.get(key, nbytes, self.deadline_s)
            except WrongLength as wrong:
                self._mark_unfit(key)
                late = Outcome.SHORT if wrong.nbytes < nbytes else Outcome.LONG
                self.outcomes[row] = late
                return
            with job.committing() as allowed:
                if allowed:
                    _scatter(data, self.addresses[row], sizes)
                    self.outcomes[row] = Outcome.OK

        self._end(row, "get", load, ends=False)

    def delete(self, _: Job, row: int) -> None:
        """Delete an object."""
        self._end(
            row, "delete", lambda key: self.client.delete_one(key, self.deadline_s)
        )
        if self.outcomes[row] == Outcome.OK:
            self.unfit.discard(self.keys[row])
        else:
            # What was to go has other bytes than its name says: the next put, which
            # would keep what is there, replaces it.
            self._mark_unfit(self.keys[row])

    def _end(
        self,
        row: int,
        what: str,
        request: Callable[[str], object],
        *,
        ends: bool = True,
    ) -> None:
        """Make a row's request and note what became of it."""
        outcome = Outcome.OK
        key = self.keys[row]
        if len(key) > MAX_KEY_BYTES:
            self.outcomes[row] = Outcome.REFUSED
            return
        try:
            request(key)
        except RequestFailed as failed:
            outcome = failed.failure.outcome
            self.note(what, failed.failure)
            if what == "put" and outcome is Outcome.ABSENT:
                # There is nothing to be absent but what holds the objects.
                outcome = Outcome.ERROR
        if ends or outcome is not Outcome.OK:
            self.outcomes[row] = outcome

    def _mark_unfit(self, key: str) -> None:
        if len(self.unfit) < _MAX_UNFIT:
            self.unfit.add(key)


def _view(address: int, nbytes: int) -> memoryview:
    """Return a piece of host memory without a copy."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _scatter(data: Any, addresses: list[int], sizes: list[int]) -> None:  # noqa: ANN401 - a buffer of the library
    """Copy an object's bytes to its pieces of host memory."""
    source = np.frombuffer(data, np.uint8)
    start = source.__array_interface__["data"][0] if len(source) else 0
    for at, nbytes in zip(addresses, sizes, strict=True):
        if nbytes:
            # Lets other threads run meanwhile, as an assignment would not.
            ctypes.memmove(at, start, nbytes)
            start += nbytes
