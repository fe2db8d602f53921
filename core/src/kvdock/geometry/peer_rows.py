"""The rows of a SEND batch: checked, cut, and written call by call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Outcome

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.batch import MemoryHold
    from kvdock.geometry.address_ranges import AddressRanges

log = logging.getLogger("kvdock")


def send_rows(
    batch: Batch,
    here: AddressRanges,
    there: AddressRanges,
    parts: Callable[[Int64Array, Int64Array], Iterable[Int64Array]],
    write: Callable[[Int64Array], tuple[Outcome, MemoryHold | None]],
) -> BatchResult:
    """Write the rows of a SEND batch in calls of a library.

    For a plugin's `kvdock_batch_io`. A row outside of the memory of either side is
    REFUSED and never reaches the library. After a call that fails, and after the
    deadline, no further call is made, and none of the rows left is OK.

    Args:
        batch: A batch with `remote`.
        here: The pool's memory, as the library knows it.
        there: The memory that the peer has offered.
        parts: Cuts rows into calls: int64 (m,) positions in the batch and int64 (n,)
            bytes of every row, to positions in the same order.
        write: Makes one call: int64 (3, k), addresses here, addresses there and
            bytes, to what became of it and what holds the memory beyond it.
    """
    outcomes = np.full(len(batch), Outcome.REFUSED, np.uint8)
    if batch.remote is None:
        return BatchResult.of(batch, outcomes)
    good = here.covered_rows(batch.addresses, batch.sizes)
    good &= there.covered_rows(batch.remote, batch.sizes)
    if not good.all():
        log.error(
            "a batch of pool %s names memory that was not attached, or not offered",
            batch.pool,
        )
    sizes = batch.sizes[:, 0]
    outcomes[good] = np.where(sizes[good] == 0, Outcome.OK, Outcome.TIMEOUT)
    table = np.stack([batch.addresses[:, 0], batch.remote[:, 0], sizes])
    chosen, hold, done = np.flatnonzero(good & (sizes > 0)), None, 0
    for rows in parts(chosen, sizes):
        if not batch.remaining_s():
            break
        found, hold = write(table[:, rows])
        outcomes[rows] = found
        if found is not Outcome.OK:
            outcomes[chosen[done:]] = found
            break
        done += len(rows)
    return attrs.evolve(BatchResult.of(batch, outcomes), hold=hold)
