"""Reading pages back: every one is verified, or it is a miss."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import numpy as np

from kvdock.batch import Batch, BatchResult, Outcome
from kvdock.segments.index import ABSENT
from kvdock.segments.io import DEADLINE, IOEngine, IORequest, IOResult

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.segments.catalog import Catalog, LookupResult, OpenSegments
    from kvdock.segments.format import Records

_DAMAGE = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
_LOST = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ESTALE, errno.ENXIO)
"""Errors that say that the bytes are gone, and not that the call was wrong."""


class Reader:
    """Loads objects that a catalogue knows.

    Args:
        catalogue: Where they are.
        engine: Moves their bytes.
    """

    def __init__(self, catalog: Catalog, engine: IOEngine) -> None:
        self._catalogue = catalog
        self._engine = engine

    def get(self, batch: Batch) -> BatchResult:
        """Fill the memory of a batch."""
        catalog = self._catalogue
        outcomes = np.full(len(batch), Outcome.ABSENT, np.uint8)
        found = catalog.lookup(batch.keys)
        if len(found.there):
            with catalog.lock:
                catalog.index.touch(found.rows, time.time_ns())
                held = catalog.open(found.numbers)
            try:
                outcomes[found.there] = self._load(batch, found, held)
            finally:
                catalog.release(held)
        catalog.count("get", outcomes)
        return BatchResult.of(batch, outcomes)

    def _load(
        self, batch: Batch, found: LookupResult, held: OpenSegments
    ) -> OutcomeArray:
        """Read and verify objects; return an outcome for each."""
        there, believed = found.there, found.records
        wanted = batch.object_bytes[there].astype(np.uint64)
        outcomes = np.full(len(there), Outcome.OK, np.uint8)
        files = held.position_of(believed["segment"])
        outcomes[files == ABSENT] = Outcome.CORRUPT  # the file is gone
        outcomes[np.isin(believed["segment"], held.failed)] = Outcome.ERROR
        outcomes[believed["nbytes"] < wanted] = Outcome.SHORT
        outcomes[believed["nbytes"] > wanted] = Outcome.LONG
        keys = found.digests[there]
        other = (believed["key_low"] != keys[:, 0]) | (
            believed["key_high"] != keys[:, 1]
        )
        outcomes[other] = Outcome.ABSENT
        chosen = np.flatnonzero((outcomes == Outcome.OK) & (wanted > 0))
        if len(chosen):
            at = there[chosen]
            transfer = IORequest(
                files=held.tokens,
                file_of=files[chosen],
                offsets=believed["slot"][chosen] * held.strides[files[chosen]],
                addresses=batch.addresses[at],
                sizes=batch.sizes[at],
                deadline_s=batch.deadline_s,
            )
            moved = self._engine.read(transfer)
            outcomes[chosen] = _verified(moved, believed[chosen])
        self._heal(found.rows, believed, outcomes)
        return outcomes

    def _heal(
        self, rows: Int64Array, believed: Records, outcomes: OutcomeArray
    ) -> None:
        """Retire what is damaged; what was only recycled becomes ABSENT."""
        if not outcomes.any():
            return
        bad = np.flatnonzero(np.isin(outcomes, _DAMAGE))
        if len(bad):
            # A key that is asked for twice is one page to retire.
            once, first, which = np.unique(
                rows[bad], return_index=True, return_inverse=True
            )
            raced = self._catalogue.invalidate(once, believed[bad[first]])[which]
            outcomes[bad[raced]] = Outcome.ABSENT
            self._catalogue.counts["pages_raced"] += int(raced.sum())


def _verified(moved: IOResult, believed: Records) -> OutcomeArray:
    """Hold what an engine moved against what was stored."""
    nbytes = believed["nbytes"].astype(np.int64)
    outcomes = np.full(len(nbytes), Outcome.OK, np.uint8)
    outcomes[moved.checksums != believed["checksum"]] = Outcome.CORRUPT
    outcomes[moved.nbytes < nbytes] = Outcome.SHORT
    if moved.errors.any():
        outcomes[moved.errors != 0] = Outcome.ERROR
        outcomes[np.isin(moved.errors, _LOST)] = Outcome.CORRUPT
        outcomes[moved.errors == DEADLINE] = Outcome.TIMEOUT
    return outcomes
