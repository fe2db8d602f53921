"""Read pages; a page that cannot be verified is a miss."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Outcome
from kvdock_segments.index import ABSENT
from kvdock_segments.io import DEADLINE, UNREGISTERED, IOEngine, IORequest, IOResult

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray, UInt64Array
    from kvdock_segments.catalog import Catalog, LookupResult, OpenSegments
    from kvdock_segments.format import Records
    from kvdock_segments.io import Token

_OK = int(Outcome.OK)
"""A plain number: numpy looks for arrays in members of enumerations, which takes
microseconds for each."""
_ABSENT = int(Outcome.ABSENT)
_ONE_OK = np.zeros(1, np.uint8)
_ONE_OK.flags.writeable = False
_FIRST = np.zeros(1, np.int64)
_FIRST.flags.writeable = False
_SLOT_SHIFT = np.uint64(48)
_EXPIRY = 2**32 - 1
_CHECKSUM, _TIMES, _SEGMENT, _PLACE = 2, 3, 5, 6
"""Words of a record; the slot is the highest quarter of the place."""
_DAMAGE = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
_LOST = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ESTALE, errno.ENXIO)
"""Errors for lost bytes, as opposed to a wrong call."""


class Reader:
    """Loads objects of a catalog."""

    def __init__(self, catalog: Catalog, engine: IOEngine) -> None:
        self._catalog = catalog
        self._engine = engine

    def exists(self, batch: Batch) -> BatchResult:
        """Find out which keys are there, for an engine that may store the others."""
        catalog = self._catalog
        catalog.refresh(looked=True)
        digests = catalog.digests(batch.keys)
        with catalog.lock:
            absent = catalog.index.find(digests) < 0
        if np.count_nonzero(absent) and catalog.refresh(missed=True):
            with catalog.lock:
                absent = catalog.index.find(digests) < 0
        catalog.note_lookup(digests, np.flatnonzero(~absent), batch.deadline_s)
        # As numbers, False and True are OK and ABSENT.
        return BatchResult.of(batch, absent.view(np.uint8))

    def get(self, batch: Batch) -> BatchResult:
        """Fill the memory of a batch."""
        catalog = self._catalog
        loaded = self.get_one(batch) if len(batch) == 1 else self.get_together(batch)
        if loaded is not None:
            catalog.count("get", loaded.outcomes)
            return loaded
        return self.get_any(batch)

    def get_one(self, batch: Batch) -> BatchResult | None:
        """Load one object that is there and whole, in plain numbers.

        Returns:
            None for any other: then nothing is decided, and `get_any` finds out
            what is wrong.
        """
        catalog = self._catalog
        size = int(batch.sizes[0].sum())
        catalog.refresh(looked=True)
        low, high = catalog.digest(batch.keys[0])
        with catalog.lock:
            index = catalog.index
            row = index.find_one(low, high)
            if row < 0 or not size:
                return None
            words = index.words[row].tolist()
            number = int(index.segment_of[row])
            segment = catalog.segments.get(number)
            if segment is None or index.object_bytes_in[number] != size:
                return None
            right = words[_SEGMENT] == segment.name.segment
            token = catalog.open_one(segment) if right else None
            if token is None:
                return None
            index.touch_one(row, index.clock.begin_read(1, batch.deadline_s))
        offsets = np.array([(words[_PLACE] >> 48) * segment.slot_bytes])
        sums = np.array([words[_CHECKSUM]], np.uint64)
        try:
            result = self._read(batch, (token,), _FIRST, offsets, sums)
        finally:
            catalog.release_one(segment)
        if (
            result.errors[0]
            or int(result.checksums[0]) != words[_CHECKSUM]
            or result.nbytes[0] != size
        ):
            return None
        end = words[_TIMES] & _EXPIRY
        ends = np.array([end], np.int64) if end else None
        return BatchResult(_ONE_OK, result.nbytes, expire_at=ends)

    def get_together(self, batch: Batch) -> BatchResult | None:
        """Load objects of one size, all there and whole; else as `get_one`."""
        catalog, sizes = self._catalog, batch.sizes
        if not sizes.size or sizes.strides[0]:
            return None
        size = int(sizes[0].sum())
        catalog.refresh(looked=True)
        digests = catalog.digests(batch.keys)
        with catalog.lock:
            index = catalog.index
            rows = index.find(digests)
            if not size or int(rows.min()) < 0:
                return None
            words, numbers = index.words[rows], index.segment_of[rows]
            if np.count_nonzero(index.object_bytes_in[numbers] != size):
                return None
            held = catalog.open(numbers)
            files = held.position_of(words[:, _SEGMENT])
            there = int(files.min()) >= 0
            if there:
                index.touch(rows, index.clock.read(len(rows), batch.deadline_s))
        sums = words[:, _CHECKSUM]
        try:
            if not there:
                return None
            slots = (words[:, _PLACE] >> _SLOT_SHIFT).astype(np.int64)
            result = self._read(
                batch, held.tokens, files, held.offsets(files, slots), sums
            )
        finally:
            catalog.release(held)
        if (
            np.count_nonzero(result.errors)
            or np.count_nonzero(result.checksums != sums)
            or np.count_nonzero(result.nbytes != size)
        ):
            return None
        outcomes = np.zeros(len(rows), np.uint8)
        return BatchResult(outcomes, result.nbytes, expire_at=_ends(words[:, _TIMES]))

    def _read(
        self,
        batch: Batch,
        files: tuple[Token, ...],
        file_of: Int64Array,
        offsets: Int64Array,
        expected: UInt64Array,
    ) -> IOResult:
        """Read all objects of a batch."""
        return self._engine.move(
            IORequest(
                write=False,
                files=files,
                file_of=file_of,
                offsets=offsets,
                addresses=batch.addresses,
                sizes=batch.sizes,
                deadline_s=batch.deadline_s,
                gate=batch.gate,
                expected=expected,
            )
        )

    def get_any(self, batch: Batch) -> BatchResult:
        """Load what can be loaded, and find out what is wrong with the rest."""
        catalog = self._catalog
        outcomes = np.full(len(batch), _ABSENT, np.uint8)
        ends = np.zeros(len(batch), np.int64)
        found = catalog.lookup(batch.keys)
        if len(found.there):
            with catalog.lock:
                used_ns = catalog.index.clock.read(len(batch), batch.deadline_s)
                catalog.index.touch(found.rows, used_ns[found.there])
                held = catalog.open(found.numbers)
            try:
                files = held.position_of(found.records["segment"])
                loaded, chosen = _expected(batch, found, files, held.failed)
                if len(chosen):
                    asked = _transfer(batch, found, chosen, held, files[chosen])
                    result = self._engine.move(asked)
                    loaded[chosen] = _verified(
                        result, found.records[chosen], found.nbytes[chosen]
                    )
                self._heal(found.rows, found.records, loaded)
            finally:
                catalog.release(held)
            outcomes[found.there] = loaded
            ends[found.there] = found.records["expire_at"]
        catalog.count("get", outcomes)
        answer = BatchResult.of(batch, outcomes)
        return attrs.evolve(answer, expire_at=ends) if ends.any() else answer

    def _heal(
        self, rows: Int64Array, believed: Records, outcomes: OutcomeArray
    ) -> None:
        """Erase damaged records; recycled ones become ABSENT."""
        if not outcomes.any():
            return
        bad = np.flatnonzero(np.isin(outcomes, _DAMAGE))
        if len(bad):
            # A key that a batch names twice is one page.
            once, first, which = np.unique(
                rows[bad], return_index=True, return_inverse=True
            )
            raced = self._catalog.invalidate(once, believed[bad[first]])[which]
            outcomes[bad[raced]] = Outcome.ABSENT
            self._catalog.counts["pages_raced"] += int(raced.sum())


def _ends(times: UInt64Array) -> Int64Array | None:
    """Return when objects expire; None where none does."""
    if not np.count_nonzero(times):
        return None
    return (times & np.uint64(_EXPIRY)).astype(np.int64)


def _expected(
    batch: Batch, found: LookupResult, files: Int64Array, shut: UInt64Array
) -> tuple[OutcomeArray, Int64Array]:
    """Compare records with what is asked for.

    Args:
        batch: What is asked for.
        found: What is known of it.
        files: int64 (m,), the open file of each object, or `ABSENT`.
        shut: Segments whose file could not be opened.

    Returns:
        uint8 (m,), an outcome for each object that was found, OK until its bytes
        are verified; and int64, the positions of those whose bytes are to be read.
    """
    believed = found.records
    wanted = batch.object_bytes[found.there]
    outcomes = np.full(len(believed), _OK, np.uint8)
    outcomes[files == ABSENT] = Outcome.CORRUPT  # the file is gone
    outcomes[np.isin(believed["segment"], shut)] = Outcome.ERROR
    outcomes[found.nbytes < wanted] = Outcome.SHORT
    outcomes[found.nbytes > wanted] = Outcome.LONG
    keys = found.digests[found.there]
    other = (believed["key_low"] != keys[:, 0]) | (believed["key_high"] != keys[:, 1])
    outcomes[other] = Outcome.ABSENT
    return outcomes, np.flatnonzero((outcomes == _OK) & (wanted > 0))


def _transfer(
    batch: Batch,
    found: LookupResult,
    chosen: Int64Array,
    held: OpenSegments,
    files: Int64Array,
) -> IORequest:
    """Ask for the bytes of chosen objects; `files` says where each one lies."""
    at = found.there[chosen]
    return IORequest(
        write=False,
        files=held.tokens,
        file_of=files,
        offsets=held.offsets(files, found.records["slot"][chosen].astype(np.int64)),
        addresses=batch.addresses[at],
        sizes=batch.sizes[at],
        deadline_s=batch.deadline_s,
        gate=batch.gate,
        expected=found.records["checksum"][chosen],
    )


def _verified(result: IOResult, believed: Records, nbytes: Int64Array) -> OutcomeArray:
    """Compare the result of a read with the records and the sizes of objects."""
    outcomes = np.full(len(nbytes), _OK, np.uint8)
    outcomes[result.checksums != believed["checksum"]] = Outcome.CORRUPT
    outcomes[result.nbytes < nbytes] = Outcome.SHORT
    if result.errors.any():
        outcomes[result.errors != 0] = Outcome.ERROR
        outcomes[np.isin(result.errors, _LOST)] = Outcome.CORRUPT
        outcomes[result.errors == UNREGISTERED] = Outcome.REFUSED
        outcomes[result.errors == DEADLINE] = Outcome.TIMEOUT
    return outcomes
