"""One call's worth of work for a backend, and its answer.

A batch is arrays: row i of everything belongs to key i. A backend answers with
one outcome per key, in the order of the keys, whatever order it works in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, TypeGuard, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import any_of
from kvdock.errors import BatchError
from kvdock.native import address_space
from kvdock.synchronization import new_condition, remaining_s

if TYPE_CHECKING:
    from typing import Self

    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray


class Operation(StrEnum):
    """The operation of a batch."""

    EXISTS = "exists"
    """Say which keys could be read now. Moves nothing."""
    PUT = "put"
    """Store the bytes. A key that is there already keeps its bytes and is OK."""
    GET = "get"
    """Fill the memory with the stored bytes."""
    DELETE = "delete"
    """Forget these keys; one that is not there is OK."""
    CLEAR = "clear"
    """Forget every object whose key begins with one of these prefixes."""
    SEND = "send"
    """Write rows of memory into the memory of a peer."""
    RETAIN = "retain"
    """Promise stored objects until `Batch.keep_until`, or let them expire at
    `Batch.expire_at`: OK, ABSENT, or REFUSED where a promise finds no room. With
    neither it changes nothing, and tells both as of now, whichever process set them.
    Only backends whose `retention` is native get one."""


class Outcome(IntEnum):
    """The result for one key. Everything but OK is a miss."""

    OK = 0
    """Done: the object is there, stored, or loaded whole."""
    ABSENT = 1
    """There is no such object."""
    SHORT = 2
    """The object is shorter than the memory."""
    LONG = 3
    """The object is longer than the memory."""
    CORRUPT = 4
    """The bytes are not those that were stored."""
    REFUSED = 5
    """The backend declines (full, over a limit, busy)."""
    TIMEOUT = 6
    """The deadline passed first."""
    UNAVAILABLE = 7
    """The backend cannot be reached, or is cut off."""
    ERROR = 8
    """Anything else; the log says what."""


_LAST = int(max(Outcome))
_OK = int(Outcome.OK)


_MOVING = (Operation.PUT, Operation.GET, Operation.SEND)
_set = object.__setattr__
"""Sets a member of a record that does not change afterwards."""

NO_MEMORY: Int64Array = np.zeros((2**31, 0), np.int64)
"""Rows without segments, of which the first n are those of n keys without bytes."""


class MemoryGate:
    """A gate to the memory of one call, closed when that call has lost it.

    An engine that cannot hold back the pages of an abandoned call gives a batch
    a gate. A backend that declares `gated_get` or `gated_put` touches the memory
    of such a batch only between `enter` and `leave`. It must wait for
    no I/O in between: abandoning the call closes the gate, which waits until
    every thread has left it.
    """

    __slots__ = ("_closed", "_inside", "_left", "_lock")

    def __init__(self) -> None:
        self._lock, self._left = new_condition()
        self._inside = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Return whether the memory has another use by now."""
        return self._closed

    def enter(self) -> bool:
        """Begin to touch the memory; if False, it must not be touched any more."""
        with self._lock:
            if self._closed:
                return False
            self._inside += 1
        return True

    def leave(self) -> None:
        """End what a successful `enter` began."""
        with self._lock:
            self._inside -= 1
            if self._closed and not self._inside:
                self._left.notify_all()

    def close(self, deadline_s: float) -> bool:
        """Let no further thread in, wait for those inside; return whether none is left.

        Args:
            deadline_s: Until when, on `time.monotonic()`'s clock.
        """
        with self._lock:
            self._closed = True
            return self._left.wait_for(
                lambda: not self._inside, remaining_s(deadline_s)
            )


# One frame for each batch: attrs would add one for each converter and validator.
@attrs.frozen(eq=False, init=False)
class Batch:
    """Keys of one pool, and where their bytes lie in host memory.

    Args:
        operation: What to do.
        keys: The n keys, unique names of objects.
        addresses: int64 (n, segments), host byte addresses; (n, 0) where no
            bytes are moved: EXISTS, DELETE, CLEAR, and pages without bytes.
        sizes: int64 (n, segments), bytes, of the same shape; 0 pads a row with
            fewer segments.
        deadline_s: When to give up, on `time.monotonic()`'s clock.
        pool: Whose pages these are; for observers, since a backend's handle
            says it already.
        gate: Says when the memory may be touched; None for as long as the call
            lasts. Only backends that declare `gated_get` and `gated_put` get one.
        remote: int64 (n, 1), where each row of a SEND goes: byte addresses in the
            peer's process. None for other operations. The keys of a SEND are the
            numbers of its rows, and its rows do not overlap at the peer.
        peer: What `connect` of the store's `peers` returned, for a SEND.
        keep_until: For PUT and RETAIN: do not evict the objects before, in seconds
            since 1970; 0 for no promise. Only backends that declare `retention` get
            it, and where that is emulated only as a wish in a PUT.
        expire_at: int64 (n,), for PUT and RETAIN: do not serve an object from then
            on, in seconds since 1970, 0 for never; None for no change. Only backends
            whose `retention` is native get it.
        tenant: For PUT: the number of the tenant that the objects are stored for, 0
            for that of the namespace's salt. A backend without room for tenants may
            ignore it.
    """

    operation: Operation
    keys: Sequence[str]
    addresses: Int64Array = attrs.field(repr=False)
    sizes: Int64Array = attrs.field(repr=False)
    deadline_s: float
    pool: str
    gate: MemoryGate | None = attrs.field(repr=False)
    remote: Int64Array | None = attrs.field(repr=False)
    peer: object = attrs.field(repr=False)
    keep_until: int
    expire_at: Int64Array | None = attrs.field(repr=False)
    tenant: int

    def __init__(  # noqa: PLR0913 - the fields of a record
        self,
        operation: Operation,
        keys: Sequence[str],
        addresses: npt.ArrayLike | None = None,
        sizes: npt.ArrayLike | None = None,
        deadline_s: float = float("inf"),
        pool: str = "",
        gate: MemoryGate | None = None,
        *,
        remote: Int64Array | None = None,
        peer: object = None,
        keep_until: int = 0,
        expire_at: Int64Array | None = None,
        tenant: int = 0,
    ) -> None:
        rows = len(keys)
        if addresses is None or sizes is None:
            nothing = NO_MEMORY[: 0 if operation in _MOVING else rows]
            addresses = nothing if addresses is None else addresses
            sizes = nothing if sizes is None else sizes
        if type(addresses) is not np.ndarray or addresses.dtype != np.int64:
            addresses = np.asarray(addresses, np.int64)
        if type(sizes) is not np.ndarray or sizes.dtype != np.int64:
            sizes = np.asarray(sizes, np.int64)
        if addresses.shape != sizes.shape or addresses.ndim != 2:  # noqa: PLR2004 - (n, segments)
            raise BatchError(
                f"addresses {addresses.shape} and sizes {sizes.shape} are not both "
                "(keys, segments)"
            )
        if len(addresses) != rows:
            raise BatchError(f"{rows} keys with {len(addresses)} rows of memory")
        _set(self, "operation", operation)
        _set(self, "keys", keys)
        _set(self, "addresses", addresses)
        _set(self, "sizes", sizes)
        _set(self, "deadline_s", deadline_s)
        _set(self, "pool", pool)
        _set(self, "gate", gate)
        _set(self, "remote", remote)
        _set(self, "peer", peer)
        _set(self, "keep_until", keep_until)
        _set(self, "expire_at", expire_at)
        _set(self, "tenant", tenant)

    @classmethod
    def send(
        cls,
        local: Int64Array,
        remote: Int64Array,
        sizes: Int64Array,
        peer: object,
        deadline_s: float,
        pool: str,
    ) -> Self:
        """Return the batch that writes rows of memory into a peer's.

        Args:
            local: int64 (n,), byte addresses of this process.
            remote: int64 (n,), byte addresses of the peer's process.
            sizes: int64 (n,), bytes.
            peer: What `connect` of the store's `peers` returned.
            deadline_s: When to give up, on `time.monotonic()`'s clock.
            pool: Whose pages these are.
        """
        if local.shape != remote.shape:
            raise BatchError(f"{len(local)} rows are sent to {len(remote)} places")
        # Numbers of rows: an object for each would cost more than the arrays.
        rows = cast("Sequence[str]", range(len(local)))
        return cls(
            Operation.SEND,
            rows,
            local[:, None],
            sizes[:, None],
            deadline_s,
            pool,
            remote=remote[:, None],
            peer=peer,
        )

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.keys)

    @property
    def object_bytes(self) -> Int64Array:
        """Bytes of each object, int64 (n,)."""
        if not self.sizes.size:
            return np.zeros(len(self.keys), np.int64)
        if self.sizes.shape[1] == 1:
            return self.sizes[:, 0]
        if self.sizes.strides[0] == 0:
            # One repeated row (see Region.addresses): sum it once, as plain numbers.
            return np.full(len(self.keys), sum(self.sizes[0].tolist()), np.int64)
        return cast("Int64Array", self.sizes.sum(axis=1))

    def remaining_s(self) -> float:
        """Return the seconds left until the deadline, never below 0."""
        return max(0.0, self.deadline_s - time.monotonic())

    def take(self, row: int) -> bytes | None:
        """Copy the bytes that a PUT is to store under one key.

        Returns:
            The pieces of its memory in one; None if the batch has a gate and that is
            closed, which is a TIMEOUT.
        """
        with self._pieces(row) as pieces:
            return None if pieces is None else b"".join(pieces)

    def land(self, row: int, data: bytes | bytearray | memoryview) -> Outcome:
        """Fill the memory of one key of a GET with the bytes that were stored.

        Returns:
            OK, or SHORT, LONG or TIMEOUT without having touched the memory: bytes that
            are fewer or more than it takes, or a gate that is closed.
        """
        given = memoryview(data).cast("B")
        nbytes = int(self.sizes[row].sum())
        if len(given) != nbytes:
            return Outcome.SHORT if len(given) < nbytes else Outcome.LONG
        with self._pieces(row) as pieces:
            if pieces is None:
                return Outcome.TIMEOUT
            start = 0
            for piece in pieces:
                piece[:] = given[start : start + len(piece)]
                start += len(piece)
        return Outcome.OK

    @contextmanager
    def _pieces(self, row: int) -> Iterator[list[memoryview] | None]:
        """Enter the gate; yield the memory of one key, or None where it is closed."""
        if self.gate is not None and not self.gate.enter():
            yield None
            return
        try:
            space = address_space()
            where = self.addresses[row].tolist(), self.sizes[row].tolist()
            yield [space[at : at + size] for at, size in zip(*where, strict=True)]
        finally:
            if self.gate is not None:
                self.gate.leave()

    def part(self, start: int, stop: int) -> Self:
        """Return keys start to stop with their memory as a batch."""
        # Rows of no segments are rows as well.
        return attrs.evolve(
            self,
            keys=self.keys[start:stop],
            addresses=self.addresses[start:stop],
            sizes=self.sizes[start:stop],
            remote=None if self.remote is None else self.remote[start:stop],
            expire_at=None if self.expire_at is None else self.expire_at[start:stop],
        )


def _as_codes(value: npt.ArrayLike) -> OutcomeArray:
    found = np.asarray(value)
    if found.dtype == np.uint8:  # a subclass of arrays
        return found
    if found.size and found.dtype.kind not in "iu":
        raise BatchError(
            f"an answer's outcomes are of type {found.dtype}",
            fix="Answer with an Outcome for each key; False would be 0, which is OK.",
        )
    # As one byte 256 would be 0 as well.
    known = (found >= 0) & (found <= _LAST)
    return np.where(known, found, np.uint8(Outcome.ERROR)).astype(np.uint8)


class MemoryHold:
    """A batch's memory that a backend may still touch after its answer.

    Some client libraries give up a transfer and finish it later, when the peer
    answers again. A backend that cannot rule that out returns a hold with its
    `BatchResult`, and calls `release` once no byte can move any more, from any
    thread. Until then the batch's pages stay leased and closing reports False.
    """

    __slots__ = ("_callbacks", "_lock", "_released")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._released = False

    @property
    def released(self) -> bool:
        """Return whether the memory is free for other uses."""
        return self._released

    def release(self) -> None:
        """End the hold; a second call does nothing."""
        with self._lock:
            self._released = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call back once it is released: at once if it is already."""
        with self._lock:
            if not self._released:
                self._callbacks.append(callback)
                return
        callback()


@attrs.frozen(eq=False, init=False)
class BatchResult:
    """A backend's answer: what became of key i, at place i.

    Args:
        outcomes: uint8 (n,), an `Outcome` for each key.
        nbytes: int64 (n,), bytes moved for each key; only read for GET.
        hold: Says that the backend may still read or write the memory of the
            batch, and until when. What such a GET has read is a miss.
        kept: bool (n,), which objects of a PUT are promised until `keep_until`, or
            of a RETAIN that asks for nothing are promised at all; None for none.
        expire_at: int64 (n,), when objects of a GET, or of a RETAIN that asks for
            nothing, expire, in seconds since 1970, 0 for never; None for never.
        cause: What a store knows of why: "full" where it refuses for lack of room,
            "key" where it lacks a key, "deleted" in the first answer after all that
            it held was deleted under it.
    """

    outcomes: OutcomeArray
    nbytes: Int64Array
    hold: MemoryHold | None
    kept: BoolArray | None = attrs.field(repr=False)
    expire_at: Int64Array | None = attrs.field(repr=False)
    cause: str

    def __init__(
        self,
        outcomes: npt.ArrayLike,
        nbytes: npt.ArrayLike,
        hold: MemoryHold | None = None,
        kept: BoolArray | None = None,
        expire_at: Int64Array | None = None,
        cause: str = "",
    ) -> None:
        if type(outcomes) is not np.ndarray or outcomes.dtype != np.uint8:
            outcomes = _as_codes(outcomes)
        if type(nbytes) is not np.ndarray or nbytes.dtype != np.int64:
            nbytes = np.asarray(nbytes, np.int64)
        _set(self, "outcomes", outcomes)
        _set(self, "nbytes", nbytes)
        _set(self, "hold", hold)
        _set(self, "kept", kept)
        _set(self, "expire_at", expire_at)
        _set(self, "cause", cause)

    @classmethod
    def of(cls, batch: Batch, outcomes: npt.ArrayLike) -> BatchResult:
        """Answer a batch; what is OK moved exactly its bytes."""
        result = cls(outcomes, batch.object_bytes)
        if not (batch.sizes.size and any_of(result.outcomes)):
            return result
        moved = np.where(result.outcomes == _OK, result.nbytes, 0)
        return cls(result.outcomes, moved)

    @classmethod
    def all(cls, batch: Batch, outcome: Outcome) -> BatchResult:
        """Answer every key of a batch alike."""
        return cls.of(batch, np.full(len(batch), outcome, np.uint8))

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Return which keys are OK, bool (n,)."""
        return cast("npt.NDArray[np.bool_]", self.outcomes == Outcome.OK)


def is_whole(result: object, batch: Batch) -> TypeGuard[BatchResult]:
    """Return whether an answer is right and says that every key is OK.

    So are nearly all answers. `validate_result` says what is wrong with any other.
    """
    return (
        type(result) is BatchResult
        and result.hold is None
        and result.outcomes.shape == result.nbytes.shape == (len(batch.keys),)
        and not any_of(result.outcomes)
        and not (
            batch.operation is Operation.GET
            and any_of(result.nbytes != batch.object_bytes)
        )
    )


def validate_result(batch: Batch, result: object) -> BatchResult:
    """Hold an answer against its batch; raise BatchError unless it has all outcomes.

    Lengths are compared with what was asked for: a result that claims OK for
    fewer or more bytes becomes SHORT or LONG, an unknown code becomes ERROR.
    """
    if not isinstance(result, BatchResult):
        raise BatchError(
            f"{batch.operation} answered with a {type(result).__name__}",
            fix="run() of a store, and kvdock_batch_io, return a BatchResult.",
        )
    rows = (len(batch),)
    if result.outcomes.shape != rows or result.nbytes.shape != rows:
        raise BatchError(
            f"{batch.operation} of {rows[0]} keys answered with "
            f"{result.outcomes.shape} outcomes and {result.nbytes.shape} byte counts",
            fix="Answer with one outcome for each of batch.keys, in their order: begin "
            "with [Outcome.TIMEOUT] * len(batch), and fill in what was done.",
        )
    if result.hold is not None and not isinstance(result.hold, MemoryHold):
        raise BatchError(
            f"{batch.operation} answered with a {type(result.hold).__name__} as hold",
            fix="BatchResult.hold is a MemoryHold or None.",
        )
    codes = result.outcomes
    # Nearly every answer is in order: look before building new arrays.
    if codes.any() and (codes > _LAST).any():
        codes = np.where(codes > _LAST, np.uint8(Outcome.ERROR), codes)
    if batch.operation is Operation.GET:
        wanted = batch.object_bytes
        if (result.nbytes != wanted).any():
            short, long = result.nbytes < wanted, result.nbytes > wanted
            ok = codes == _OK
            codes = np.where(ok & short, np.uint8(Outcome.SHORT), codes)
            codes = np.where(ok & long, np.uint8(Outcome.LONG), codes)
    if codes is result.outcomes:
        return result
    return attrs.evolve(result, outcomes=codes)
