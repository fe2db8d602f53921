"""Read pages; a page that cannot be verified is a miss."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.arrays import any_of
from kvdock.batch import Batch, BatchResult, Outcome
from kvdock_segments.index import ABSENT
from kvdock_segments.io import DEADLINE, UNREGISTERED, IOEngine, IORequest, IOResult

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray, UInt64Array
    from kvdock_segments.catalog import Catalog, LookupResult, OpenSegments
    from kvdock_segments.format import Records

_OK = int(Outcome.OK)
"""A plain number: numpy looks for arrays in members of enumerations, which takes
microseconds for each."""
_ABSENT = int(Outcome.ABSENT)
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
        if any_of(absent) and catalog.refresh(missed=True):
            with catalog.lock:
                absent = catalog.index.find(digests) < 0
        catalog.note_lookup(digests, (~absent).nonzero()[0], batch.deadline_s)
        # As numbers, False and True are OK and ABSENT.
        return BatchResult(absent.view(np.uint8), np.zeros(len(absent), np.int64))

    def get(self, batch: Batch) -> BatchResult:
        """Load what can be loaded, and find out what is wrong with the rest."""
        catalog = self._catalog
        outcomes = np.full(len(batch), _ABSENT, np.uint8)
        ends = np.zeros(len(batch), np.int64)
        found = catalog.lookup(batch.keys)
        if len(found.there):
            with catalog.lock:
                first_ns = catalog.index.clock.read(len(batch), batch.deadline_s)
                catalog.index.touch(found.rows, first_ns - found.there)
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
                catalog.release_all(held.segments)
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
