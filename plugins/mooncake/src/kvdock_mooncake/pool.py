"""Batches of one pool, as calls of the library."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.batches import Batch, BatchResult, Int64s, Operation, Outcome, Outcomes
from kvdock_mooncake.client import Client, Member, Shut
from kvdock_mooncake.codes import (
    BAD_ARGUMENTS,
    LEASED,
    NO_ANSWER,
    NO_ROOM,
    NO_TIME,
    TRANSFER_FAILED,
    outcomes_of,
)

log = logging.getLogger("kvdock")

_LOOKUP_KEYS = 4096
"""Keys of one lookup or removal: some milliseconds, so that deadlines hold."""

_ROOM_EVERY_S = 0.01

Call = Callable[[Any, Batch], Sequence[int]]
"""(store, part of a batch) to the library's number for each key."""


@attrs.frozen(eq=False)
class PoolHandle:
    """One pool of an attachment.

    Args:
        client: The client that it shares with the other pools.
        member: Its share of it.
        namespace: What a clear of its own must ask for.
    """

    client: Client
    member: Member
    namespace: str

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch.

        A call of the library cannot be cut short, and until it ends it may
        still write into the batch's memory. So this returns late rather than
        early when a peer blocks; whoever waits keeps the memory back.
        """
        try:
            with self.client.using(self.member) as store:
                # Inside: nothing is unregistered between the look and the call.
                if not self.client.memory.covers(batch.addresses, batch.sizes):
                    log.error("a batch names memory that was not attached")
                    return BatchResult.all(batch, Outcome.REFUSED)
                return self._run(store, batch)
        except Shut as reason:
            log.debug("mooncake: %s", reason)
            return BatchResult.all(batch, Outcome.UNAVAILABLE)

    def _run(self, store: Any, batch: Batch) -> BatchResult:  # noqa: ANN401 - the library's own class
        match batch.operation:
            case Operation.EXISTS:
                return BatchResult.of(batch, self._exists(store, batch))
            case Operation.PUT:
                return BatchResult.of(batch, self._put(store, batch))
            case Operation.GET:
                return self._get(store, batch)
            case Operation.DELETE:
                return BatchResult.of(batch, self._delete(store, batch))
            case Operation.CLEAR:
                return BatchResult.of(batch, self._clear(store, batch))

    # --- Look up -------------------------------------------------------------

    def _exists(self, store: Any, batch: Batch) -> Outcomes:  # noqa: ANN401 - the library's own class
        known = self.client.sightings.known(batch.keys)
        numbers = np.ones(len(batch), np.int64)
        if known.any():
            asked = np.flatnonzero(~known)
            numbers[asked] = self._each(store, _rows(batch, asked), self._ask)
        else:
            asked = None
            numbers[:] = self._each(store, batch, self._ask)
        self.client.note(Operation.EXISTS, numbers)
        if self.client.sightings.lease_s:
            there = numbers > 0 if asked is None else (numbers > 0) & ~known
            keys = batch.keys
            self.client.sightings.saw(
                keys
                if there.all()
                else [keys[i] for i in np.flatnonzero(there).tolist()]
            )
        outcomes = outcomes_of(numbers)
        outcomes[numbers == 0] = Outcome.ABSENT
        return outcomes

    def _ask(self, store: Any, batch: Batch) -> Sequence[int]:  # noqa: ANN401 - the library's own class
        if self.client.library.probes:
            return [int(one) for one in store.batch_probe_key(batch.keys)]
        answer: Sequence[int] = store.batch_is_exist(batch.keys)
        return answer

    # --- Move ----------------------------------------------------------------

    def _put(self, store: Any, batch: Batch) -> Outcomes:  # noqa: ANN401 - the library's own class
        """Store; a number of 0 says that the key is there, not who wrote it."""
        numbers = self._moved(store, _marked(batch, self.client), self._write)
        patience = time.monotonic() + self.client.settings.full_wait_s
        until = min(patience, batch.deadline_s)
        while (numbers == NO_ROOM).any() and time.monotonic() < until:
            # Eviction frees memory in steps of some ten milliseconds.
            time.sleep(_ROOM_EVERY_S)
            full = np.flatnonzero(numbers == NO_ROOM)
            again = _rows(_marked(batch, self.client), full)
            numbers[full] = self._moved(store, again, self._write)
        self.client.note(Operation.PUT, numbers)
        return outcomes_of(numbers)

    def _get(self, store: Any, batch: Batch) -> BatchResult:  # noqa: ANN401 - the library's own class
        """Load; the numbers are the bytes that each object really has."""
        wanted = batch.object_bytes
        marks = wanted == 0
        if marks.any():
            return self._get_with_marks(store, batch, marks)
        numbers = self._moved(store, batch, self._read)
        outcomes = outcomes_of(numbers)
        nbytes = np.maximum(numbers, 0)
        if (numbers != wanted).any():
            self.client.sightings.forget(
                [batch.keys[i] for i in np.flatnonzero(numbers != wanted).tolist()]
            )
            self._judge_lengths(store, batch, numbers, outcomes, nbytes)
        self.client.note(Operation.GET, numbers)
        return BatchResult(outcomes, nbytes)

    def _get_with_marks(
        self,
        store: Any,  # noqa: ANN401 - the library's own class
        batch: Batch,
        marks: npt.NDArray[np.bool_],
    ) -> BatchResult:
        """Load where some objects have no bytes: those only need to be there."""
        outcomes = np.empty(len(batch), np.uint8)
        nbytes = np.zeros(len(batch), np.int64)
        where = np.flatnonzero(marks)
        outcomes[where] = self._exists(store, _rows(batch, where))
        where = np.flatnonzero(~marks)
        if len(where):
            rest = self._get(store, _rows(batch, where))
            outcomes[where], nbytes[where] = rest.outcomes, rest.nbytes
        return BatchResult(outcomes, nbytes)

    def _judge_lengths(
        self,
        store: Any,  # noqa: ANN401 - the library's own class
        batch: Batch,
        numbers: Int64s,
        outcomes: Outcomes,
        nbytes: Int64s,
    ) -> None:
        """Find objects of a wrong length among what failed, and drop them.

        The library answers a wrong length with the number of a bad argument
        or of a failed transfer, so the lengths are asked for. An object that
        stayed would refuse every later put of its key.
        """
        odd = (numbers == BAD_ARGUMENTS) | (numbers == TRANSFER_FAILED)
        suspects = np.flatnonzero(odd)
        if len(suspects) and batch.remaining_s():
            sizes = _sizes_of(store, [batch.keys[i] for i in suspects.tolist()])
            nbytes[suspects] = np.where(sizes > 0, sizes, nbytes[suspects])
        wanted = batch.object_bytes
        wrong = (nbytes > 0) & (nbytes != wanted)
        outcomes[wrong & (nbytes < wanted)] = Outcome.SHORT
        outcomes[wrong & (nbytes > wanted)] = Outcome.LONG
        if wrong.any():
            numbers[wrong] = 0
            self._remove(store, _rows(batch, np.flatnonzero(wrong)))

    def _write(self, store: Any, batch: Batch) -> Sequence[int]:  # noqa: ANN401 - the library's own class
        config = self.client.put_config
        addresses, sizes = _pieces(batch)
        put = (
            store.batch_put_from
            if batch.addresses.shape[1] == 1
            else store.batch_put_from_multi_buffers
        )
        answer: Sequence[int] = put(batch.keys, addresses, sizes, config)
        return answer

    def _read(self, store: Any, batch: Batch) -> Sequence[int]:  # noqa: ANN401 - the library's own class
        addresses, sizes = _pieces(batch)
        get = (
            store.batch_get_into
            if batch.addresses.shape[1] == 1
            else store.batch_get_into_multi_buffers
        )
        answer: Sequence[int] = get(batch.keys, addresses, sizes)
        return answer

    # --- Forget --------------------------------------------------------------

    def _delete(self, store: Any, batch: Batch) -> Outcomes:  # noqa: ANN401 - the library's own class
        self.client.sightings.forget(batch.keys)
        numbers = self._remove(store, batch)
        self.client.note(Operation.DELETE, numbers)
        outcomes = outcomes_of(numbers)
        outcomes[outcomes == Outcome.ABSENT] = Outcome.OK
        return outcomes

    def _remove(self, store: Any, batch: Batch) -> Int64s:  # noqa: ANN401 - the library's own class
        """Remove keys; those under a lease by force, in a second step."""
        if "batch_remove" in self.client.library.methods:
            numbers = self._each(store, batch, lambda s, b: s.batch_remove(b.keys))
            leased = np.flatnonzero(numbers == LEASED)
            if len(leased):
                numbers[leased] = self._each(
                    store,
                    _rows(batch, leased),
                    lambda s, b: s.batch_remove(b.keys, True),
                )
            return numbers
        return self._each(
            store,
            batch,
            lambda s, b: [s.remove(key, True) for key in b.keys],
        )

    def _clear(self, store: Any, batch: Batch) -> Outcomes:  # noqa: ANN401 - the library's own class
        """Forget the own namespace, and nothing that begins otherwise."""
        outcomes = np.full(len(batch), Outcome.REFUSED, np.uint8)
        for row, prefix in enumerate(batch.keys):
            if prefix == f"{self.namespace}/":
                self.client.sightings.forget_all()
                pattern = f"^{re.escape(prefix)}.*"
                removed = int(store.remove_by_regex(pattern, True))
                numbers = np.array([min(removed, 0)], np.int64)
                self.client.note(Operation.CLEAR, numbers)
                outcomes[row] = outcomes_of(numbers)[0]
        return outcomes

    # --- In calls of bounded size ---------------------------------------------

    def _moved(self, store: Any, batch: Batch, call: Call) -> Int64s:  # noqa: ANN401 - the library's own class
        """Move a batch in calls that are bounded by pieces and by bytes.

        No call names a key twice: the library then fills only the last one's
        memory and reports success for all (measured with 0.3.13).
        """
        if len(set(batch.keys)) < len(batch):
            numbers = np.full(len(batch), NO_TIME, np.int64)
            for rows in _rounds(batch.keys):
                numbers[rows] = self._moved(store, _rows(batch, rows), call)
            return numbers
        pieces = max(1, batch.addresses.shape[1])
        largest = int(batch.object_bytes.max(initial=1))
        settings = self.client.settings
        most = min(settings.max_pieces // pieces, settings.max_call_bytes // largest)

        def bounded(store: Any, part: Batch) -> Sequence[int]:  # noqa: ANN401 - the library's own class
            allowance = self.client.allowance
            with allowance.take(len(part) * pieces, part.deadline_s) as granted:
                return call(store, part) if granted else [NO_TIME] * len(part)

        return self._each(store, batch, bounded, max(1, most))

    def _each(
        self,
        store: Any,  # noqa: ANN401 - the library's own class
        batch: Batch,
        call: Call,
        rows: int = _LOOKUP_KEYS,
    ) -> Int64s:
        """Call for so many keys at a time, until the deadline."""
        numbers = np.full(len(batch), NO_TIME, np.int64)
        for start, part in _parts(batch, rows):
            if not batch.remaining_s():
                break
            answer = call(store, part)
            stop = start + len(part)
            # On a store in a bad state some calls return an empty list.
            numbers[start:stop] = answer if len(answer) == len(part) else NO_ANSWER
        return numbers


def _parts(batch: Batch, rows: int) -> Iterator[tuple[int, Batch]]:
    if len(batch) <= rows:
        if len(batch):
            yield 0, batch
        return
    for start in range(0, len(batch), rows):
        yield start, batch.part(start, start + rows)


def _rounds(keys: Sequence[str]) -> list[Int64s]:
    """Divide rows so that no key comes twice in one round."""
    seen: dict[str, int] = {}
    rounds: list[list[int]] = []
    for row, key in enumerate(keys):
        turn = seen[key] = seen.get(key, -1) + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(row)
    return [np.array(rows, np.int64) for rows in rounds]


def _rows(batch: Batch, rows: Int64s) -> Batch:
    """Return some keys of a batch with their memory."""
    keys = [batch.keys[row] for row in rows.tolist()]
    if not batch.addresses.size:
        return attrs.evolve(batch, keys=keys)
    return attrs.evolve(
        batch, keys=keys, addresses=batch.addresses[rows], sizes=batch.sizes[rows]
    )


def _marked(batch: Batch, client: Client) -> Batch:
    """Give objects without bytes one byte: the library stores no empty ones."""
    empty = batch.object_bytes == 0
    if not empty.any():
        return batch
    width = max(1, batch.addresses.shape[1])
    addresses = np.zeros((len(batch), width), np.int64)
    sizes = np.zeros((len(batch), width), np.int64)
    if batch.addresses.size:
        addresses[:], sizes[:] = batch.addresses, batch.sizes
    addresses[empty, 0] = client.mark.address
    sizes[empty, 0] = client.mark.nbytes
    return attrs.evolve(batch, addresses=addresses, sizes=sizes)


def _pieces(batch: Batch) -> tuple[list[Any], list[Any]]:
    """Return memory as the library takes it: flat, or a list for each key."""
    addresses, sizes = batch.addresses, batch.sizes
    if addresses.shape[1] == 1:
        return addresses[:, 0].tolist(), sizes[:, 0].tolist()
    if sizes.all():
        return addresses.tolist(), sizes.tolist()
    # A piece of no bytes is padding, and its address may be anything.
    some = [row != 0 for row in sizes]
    return (
        [row[keep].tolist() for row, keep in zip(addresses, some, strict=True)],
        [row[keep].tolist() for row, keep in zip(sizes, some, strict=True)],
    )


def _sizes_of(store: Any, keys: list[str]) -> Int64s:  # noqa: ANN401 - the library's own class
    """Return the stored bytes of each key, 0 where they are not known."""
    found = store.batch_get_replica_desc(keys)
    sizes = np.zeros(len(keys), np.int64)
    for row, key in enumerate(keys):
        for replica in found.get(key, ()):
            if replica.is_memory_replica():
                described = replica.get_memory_descriptor().buffer_descriptor
                sizes[row] = int(described.size)
    return sizes
