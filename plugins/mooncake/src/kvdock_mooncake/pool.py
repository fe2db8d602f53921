# ruff: noqa: ANN401 - the library's store has no types
"""Batches of one pool, as calls of the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Batch, BatchResult, Operation, Outcome
from kvdock_mooncake.batching import (
    marked,
    pieces_of,
    repeated,
    rounds,
    rows_of,
    sizes_of,
)
from kvdock_mooncake.clear import clear
from kvdock_mooncake.client import ClientClosed
from kvdock_mooncake.error_codes import (
    BAD_ARGUMENTS,
    GIVEN_UP,
    LEASE_EXPIRED,
    LEASED,
    MASTER_LOST,
    MASTER_SILENT,
    NO_ANSWER,
    NO_ROOM,
    NO_TIME,
    NOT_FOUND,
    NOT_READY,
    TRANSFER_FAILED,
    given_up,
    outcomes_of,
)
from kvdock_mooncake.held_memory import CallTimer
from kvdock_mooncake.master_status import MasterStatus

if TYPE_CHECKING:
    from kvdock import Capacity
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.peers.connections import ConnectedPool
    from kvdock_mooncake.client import Client, PoolRegistration
    from kvdock_mooncake.namespace_state import NamespaceState

log = logging.getLogger("kvdock")

_LOOKUP_KEYS = 4096
"""Keys of one lookup or removal: some milliseconds, so that deadlines hold."""

_WHEN_CLOSED = MappingProxyType(
    {
        Operation.EXISTS: Outcome.ABSENT,
        Operation.GET: Outcome.ABSENT,
        # What is stored under these keys would keep its old bytes.
        Operation.PUT: Outcome.REFUSED,
    }
)
"""What becomes of keys whose namespace was cleared while leases last."""

_MOVING = (Operation.PUT, Operation.GET)

_LEASE_RETRIES = 3
"""How often objects are read again whose lease ran out during the read."""

_AGAIN_EVERY_S = 0.01
_LEASES_EVERY_S = 0.25

Call = Callable[[Any, Sequence[str], slice], Sequence[int]]
"""(store, some keys of a batch, their rows) to the library's number for each key."""

Move = Callable[[Any, Sequence[str], list[Any], list[Any]], Sequence[int]]
"""(store, keys, addresses, sizes) to the same."""


@attrs.frozen(eq=False)
class PoolHandle:
    """One pool of an attachment."""

    client: Client
    member: PoolRegistration
    state: NamespaceState
    peers: ConnectedPool

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch.

        A call of the library cannot be cut short, and until it ends it may
        still write into the batch's memory. So this returns late rather than
        early when a peer blocks; the caller keeps the memory leased until then.
        """
        client = self.client
        try:
            store = client.acquire(self.member)
        except ClientClosed as reason:
            log.debug("mooncake: %s", reason)
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        try:
            # Inside: nothing is unregistered between the look and the call.
            if not client.memory.covers(batch.addresses, batch.sizes):
                log.error("a batch names memory that was not attached")
                return BatchResult.all(batch, Outcome.REFUSED)
            held = client.held.full and batch.operation in _MOVING
            if held or client.master.is_down():
                return BatchResult.all(batch, Outcome.UNAVAILABLE)
            if batch.operation not in _WHEN_CLOSED:
                return self._run(store, batch)
            if not self.state.acquire():
                return BatchResult.all(batch, _WHEN_CLOSED[batch.operation])
            try:
                return self._run(store, batch)
            except Exception:
                # What it has leased until then is not known.
                self.state.note_lease()
                raise
            finally:
                self.state.release()
        finally:
            client.release(self.member)

    def capacity(self) -> Capacity | None:
        """Return how full the cluster is, or the disk to which this process spills."""
        status = MasterStatus.of(self.client.settings)
        found = status.capacity() if status else None
        if found:
            return found
        spill = self.client.spill
        return spill.disk.capacity if spill else None

    def close(self) -> None:
        """Unregister the pool's memory; the last one leaves the cluster."""
        self.peers.release()
        self.client.release_pool(self.member)

    def _run(self, store: Any, batch: Batch) -> BatchResult:  # noqa: PLR0911 - the library's own class; one for each operation
        match batch.operation:
            case Operation.EXISTS:
                return BatchResult.of(batch, self._exists(store, batch))
            case Operation.PUT:
                return self._put(store, batch)
            case Operation.GET:
                return self._get(store, batch)
            case Operation.DELETE:
                return BatchResult.of(batch, self._delete(store, batch))
            case Operation.CLEAR:
                return BatchResult.of(batch, self._clear(store, batch))
            case Operation.SEND:
                return self.peers.send(batch)
            case Operation.RETAIN:  # the manifest declares no native retention
                return BatchResult.all(batch, Outcome.REFUSED)

    # --- Look up -------------------------------------------------------------

    def _exists(self, store: Any, batch: Batch) -> OutcomeArray:
        known = self.client.lookup_cache.contains(batch.keys)
        numbers = np.ones(len(batch), np.int64)
        if known.any():
            asked = np.flatnonzero(~known)
            numbers[asked] = self._in_chunks(store, rows_of(batch, asked), self._ask)
        else:
            asked = None
            numbers[:] = self._in_chunks(store, batch, self._ask)
        self.client.health.record(Operation.EXISTS, numbers)
        if not self.client.library.probes and (numbers > 0).any():
            self.state.note_lease()
        if self.client.lookup_cache.lease_s:
            there = numbers > 0 if asked is None else (numbers > 0) & ~known
            keys = batch.keys
            self.client.lookup_cache.add(
                keys
                if there.all()
                else [keys[i] for i in np.flatnonzero(there).tolist()]
            )
        outcomes = outcomes_of(numbers)
        outcomes[numbers == 0] = Outcome.ABSENT
        if self.client.corrupt_keys:
            unfit = [key in self.client.corrupt_keys for key in batch.keys]
            outcomes[np.array(unfit, np.bool_)] = Outcome.ABSENT
        return outcomes

    def _ask(self, store: Any, keys: Sequence[str], _: slice) -> Sequence[int]:
        if self.client.library.probes:
            return [int(one) for one in store.batch_probe_key(keys)]
        answer: Sequence[int] = store.batch_is_exist(keys)
        return answer

    # --- Move ----------------------------------------------------------------

    def _put(self, store: Any, asked: Batch) -> BatchResult:
        """Store; a number of 0 says that the key is there, not whose bytes."""
        batch = marked(asked, self.client.mark)
        unfit = self.client.corrupt_keys
        # Rarely any: the keys are not looked at one by one.
        healing = (
            [row for row, key in enumerate(batch.keys) if key in unfit] if unfit else []
        )
        if not healing:
            numbers = self._retry(store, batch, self._writer(batch), NO_ROOM)
        else:
            numbers = np.empty(len(batch), np.int64)
            rows = np.array(healing, np.int64)
            rest = np.setdiff1d(np.arange(len(batch)), rows)
            # First what needs not wait for the leases of wrong objects.
            others = rows_of(batch, rest)
            numbers[rest] = self._retry(store, others, self._writer(batch), NO_ROOM)
            numbers[rows] = self._overwrite(store, rows_of(batch, rows))
        if not np.count_nonzero(numbers):
            self.client.health.record_success(Operation.PUT)
            return BatchResult(np.zeros(len(asked), np.uint8), asked.object_bytes)
        self.client.health.record(Operation.PUT, numbers)
        return self._held(batch, numbers, BatchResult.of(asked, outcomes_of(numbers)))

    def _held(
        self, batch: Batch, numbers: Int64Array, result: BatchResult
    ) -> BatchResult:
        """Hold a batch's memory if a transfer of it may still go on."""
        if not (numbers == GIVEN_UP).any():
            return result
        hold = self.client.held.add(int(batch.object_bytes.sum()))
        return attrs.evolve(result, hold=hold)

    def _retry(self, store: Any, batch: Batch, move: Move, passing: int) -> Int64Array:
        """Move a batch; try again for a little while what may soon succeed.

        There is no room until eviction has freed some, in steps of some ten
        milliseconds. An object is not ready while another process still
        writes it, although this one's put of the same key was called a
        success.
        """
        numbers = self._transfer(store, batch, move)
        if not np.count_nonzero(numbers == passing):
            return numbers
        patience = time.monotonic() + self.client.settings.full_wait_s
        until = min(patience, batch.deadline_s)
        while (numbers == passing).any() and time.monotonic() < until:
            time.sleep(_AGAIN_EVERY_S)
            rows = np.flatnonzero(numbers == passing)
            numbers[rows] = self._transfer(store, rows_of(batch, rows), move)
        return numbers

    def _overwrite(self, store: Any, batch: Batch) -> Int64Array:
        """Write over objects of a wrong length: the library keeps them at every put."""
        numbers = self._remove_unleased(store, batch)
        gone = np.flatnonzero((numbers == 0) | (numbers == NOT_FOUND))
        self.client.corrupt_keys.difference_update(
            batch.keys[row] for row in gone.tolist()
        )
        again = rows_of(batch, gone)
        numbers[gone] = self._retry(store, again, self._writer(batch), NO_ROOM)
        return numbers

    def _get(self, store: Any, batch: Batch) -> BatchResult:
        """Load; the numbers are the bytes that each object really has."""
        wanted = batch.object_bytes
        if not wanted.all():
            return self._get_with_marks(store, batch, wanted == 0)
        numbers = self._retry(store, batch, self._read, NOT_READY)
        for _ in range(_LEASE_RETRIES):
            # On a busy host a read may take longer than its lease; the next one
            # takes a new lease, and is about fewer objects.
            expired = np.flatnonzero(numbers == LEASE_EXPIRED)
            if not len(expired) or not batch.remaining_s():
                break
            again = rows_of(batch, expired)
            numbers[expired] = self._transfer(store, again, self._read)
        self.state.note_lease()
        if not np.count_nonzero(numbers != wanted):
            self.client.health.record_success(Operation.GET)
            return BatchResult(np.zeros(len(batch), np.uint8), numbers)
        outcomes = outcomes_of(numbers)
        nbytes = np.maximum(numbers, 0)
        missed = np.flatnonzero(numbers != wanted).tolist()
        self.client.lookup_cache.discard([batch.keys[row] for row in missed])
        self._mark_wrong_lengths(store, batch, numbers, outcomes, nbytes)
        self.client.health.record(Operation.GET, numbers)
        return self._held(batch, numbers, BatchResult(outcomes, nbytes))

    def _get_with_marks(
        self, store: Any, batch: Batch, marks: npt.NDArray[np.bool_]
    ) -> BatchResult:
        """Load where some objects have no bytes: those only need to be there."""
        outcomes = np.empty(len(batch), np.uint8)
        nbytes = np.zeros(len(batch), np.int64)
        where = np.flatnonzero(marks)
        outcomes[where] = self._exists(store, rows_of(batch, where))
        where = np.flatnonzero(~marks)
        if not len(where):
            return BatchResult(outcomes, nbytes)
        rest = self._get(store, rows_of(batch, where))
        outcomes[where], nbytes[where] = rest.outcomes, rest.nbytes
        return BatchResult(outcomes, nbytes, rest.hold)

    def _mark_wrong_lengths(
        self,
        store: Any,
        batch: Batch,
        numbers: Int64Array,
        outcomes: OutcomeArray,
        nbytes: Int64Array,
    ) -> None:
        """Find objects of a wrong length among what failed, and mark them.

        The library answers a wrong length with the number of a bad argument
        or of a failed transfer, so the lengths are asked for.
        """
        odd = (numbers == BAD_ARGUMENTS) | (numbers == TRANSFER_FAILED)
        suspects = np.flatnonzero(odd)
        if len(suspects) and batch.remaining_s():
            sizes = sizes_of(store, [batch.keys[i] for i in suspects.tolist()])
            self.state.note_lease()
            nbytes[suspects] = np.where(sizes > 0, sizes, nbytes[suspects])
        wanted = batch.object_bytes
        wrong = (nbytes > 0) & (nbytes != wanted)
        outcomes[wrong & (nbytes < wanted)] = Outcome.SHORT
        outcomes[wrong & (nbytes > wanted)] = Outcome.LONG
        if wrong.any():
            numbers[wrong] = 0
            rows = np.flatnonzero(wrong).tolist()
            self.client.corrupt_keys.update(batch.keys[row] for row in rows)

    def _writer(self, batch: Batch) -> Move:
        """Return what stores keys of a batch, pinned for as long as it asks for."""

        def write(store: Any, keys: Sequence[str], *memory: list[Any]) -> list[int]:
            several = type(memory[0][0]) is list
            name = "batch_put_from_multi_buffers" if several else "batch_put_from"
            put, config = getattr(store, name), self.client.put_options.config
            answer: list[int] = put(keys, *memory, config(keys, batch.keep_until))
            if batch.keep_until and BAD_ARGUMENTS in answer:
                # Longer than this master pins: stored all the same. What is there
                # already keeps its pin.
                answer = put(keys, *memory, config(keys))
            return answer

        return write

    def _read(self, store: Any, keys: Sequence[str], *memory: list[Any]) -> list[int]:
        several = type(memory[0][0]) is list
        get = store.batch_get_into_multi_buffers if several else store.batch_get_into
        answer: list[int] = get(keys, *memory)
        return answer

    # --- Forget --------------------------------------------------------------
    #
    # Nothing is removed by force. The library frees a removed object's memory
    # at once, so a reader in another process that has just begun would get the
    # bytes of whatever is stored there next, reported as a success
    # (seen with 0.3.13). The lease of a reader is what keeps it safe.

    def _delete(self, store: Any, batch: Batch) -> OutcomeArray:
        """Remove keys; one that is not there is as good as removed."""
        numbers = self._remove_unleased(store, batch)
        # Not announced any more, and written over by the next put.
        leased = np.flatnonzero(numbers == LEASED).tolist()
        self.client.corrupt_keys.update(batch.keys[row] for row in leased)
        self.client.health.record(Operation.DELETE, numbers)
        outcomes = outcomes_of(numbers)
        outcomes[outcomes == Outcome.ABSENT] = Outcome.OK
        return outcomes

    def _remove_unleased(self, store: Any, batch: Batch) -> Int64Array:
        """Remove keys; wait for leases if they surely end in time."""
        self.client.lookup_cache.discard(batch.keys)
        numbers = self._in_chunks(store, batch, self._remove)
        lease_s = self.client.settings.lease_s
        if batch.remaining_s() < lease_s:
            return numbers
        lease_s *= 1.2  # some room for clocks
        until = min(batch.deadline_s, time.monotonic() + lease_s)
        while (numbers == LEASED).any() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, lease_s / 20, _LEASES_EVERY_S))
            leased = np.flatnonzero(numbers == LEASED)
            again = self._in_chunks(store, rows_of(batch, leased), self._remove)
            # What there was no time to ask for again is leased, as far as known.
            numbers[leased] = np.where(again == NO_TIME, LEASED, again)
        return numbers

    def _remove(self, store: Any, keys: Sequence[str], _: slice) -> Sequence[int]:
        if "batch_remove" in self.client.library.methods:
            removed: Sequence[int] = store.batch_remove(keys)
            return removed
        return [int(store.remove(key)) for key in keys]

    def _clear(self, store: Any, batch: Batch) -> OutcomeArray:
        """Forget the own namespace, and nothing that begins otherwise."""
        outcomes = np.full(len(batch), Outcome.REFUSED, np.uint8)
        for row, prefix in enumerate(batch.keys):
            if prefix == f"{self.state.namespace}/":
                number = clear(self.client, store, self.state, batch.deadline_s)
                numbers = np.array([number], np.int64)
                self._master_answered(numbers)
                self.client.health.record(Operation.CLEAR, numbers)
                outcomes[row] = outcomes_of(numbers)[0]
        return outcomes

    # --- In calls of bounded size ---------------------------------------------

    def _transfer(self, store: Any, batch: Batch, move: Move) -> Int64Array:
        """Move a batch in calls that are bounded by pieces and by bytes.

        No call names a key twice: the library then fills only the last one's
        memory and reports success for all (measured with 0.3.13).
        """
        if len(set(batch.keys)) < len(batch):
            numbers = np.full(len(batch), NO_TIME, np.int64)
            for rows in rounds(batch.keys):
                numbers[rows] = self._transfer(store, rows_of(batch, rows), move)
            return numbers
        pieces = max(1, batch.addresses.shape[1])
        if repeated(batch.sizes):
            largest = max(1, sum(batch.sizes[0].tolist()))
        else:
            largest = max(1, int(batch.object_bytes.max(initial=1)))
        allowance = self.client.in_flight
        most_bytes = self.client.settings.max_call_bytes
        most = min(allowance.most // pieces, most_bytes // largest)
        # Once for all calls: a list for each of them costs less than a batch.
        addresses, sizes = pieces_of(batch)

        def bounded(store: Any, keys: Sequence[str], rows: slice) -> Sequence[int]:
            count = len(keys) * pieces
            if not allowance.enter(count, batch.deadline_s):
                return [NO_TIME] * len(keys)
            try:
                return self._timed(
                    len(keys), lambda: move(store, keys, addresses[rows], sizes[rows])
                )
            finally:
                allowance.leave(count)

        return self._in_chunks(store, batch, bounded, max(1, most))

    def _timed(self, keys: int, move: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Move a batch; mark what failed so late that it may not have ended."""
        timer, limit_s = CallTimer(), self.client.held.limit_s
        try:
            answer = move()
        except Exception:
            if timer.elapsed_s() < limit_s:
                raise
            log.exception("mooncake: a call of the library failed at its limit")
            return [GIVEN_UP] * keys
        if timer.elapsed_s() < limit_s:
            return answer
        if len(answer) != keys:
            return [GIVEN_UP] * keys
        numbers: list[int] = given_up(np.asarray(answer, np.int64)).tolist()
        return numbers

    def _in_chunks(
        self, store: Any, batch: Batch, call: Call, rows: int = _LOOKUP_KEYS
    ) -> Int64Array:
        """Call for so many keys at a time, until the deadline."""
        count = len(batch)
        numbers = np.full(count, NO_TIME, np.int64)
        for start in range(0, count, rows):
            if not batch.remaining_s():
                break
            stop = min(start + rows, count)
            keys = batch.keys[start:stop]
            answer = call(store, keys, slice(start, stop))
            # On a store in a bad state some calls return an empty list.
            numbers[start:stop] = answer if len(answer) == len(keys) else NO_ANSWER
            if not self._master_answered(numbers[start:stop]):
                numbers[stop:] = MASTER_SILENT
                break
        return numbers

    def _master_answered(self, numbers: Int64Array) -> bool:
        first = int(numbers[0])
        if first in MASTER_LOST and np.isin(numbers, MASTER_LOST).all():
            if not self._only_owners_lost(numbers):
                self.client.master.mark_down()
                return False
            self.client.master.mark_up()
            return True
        if (
            first == GIVEN_UP
            and self.client.settings.standalone
            and (numbers == GIVEN_UP).all()
        ):
            self.client.master.mark_down()
            return False
        if first not in (NO_TIME, NO_ANSWER, GIVEN_UP):
            self.client.master.mark_up()
        return True

    def _only_owners_lost(self, numbers: Int64Array) -> bool:
        """Return whether the master answers although every key says no.

        A read from the disk of an owner that has died ends in the same number:
        all other pages would be misses until the master gives the owner up.
        """
        client = self.client
        silent = (numbers == MASTER_SILENT).any() or client.settings.standalone
        return not silent and client.reachable()
