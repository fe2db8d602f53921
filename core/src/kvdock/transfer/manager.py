"""Loading and storing in the background, batch by batch.

Reads and writes have lanes of their own, so a slow store never holds up a
prefetch. Between two batches a transfer can be stopped or cancelled. Trailing
windows are read last, for the boundary that was really reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.batch import Outcome
from kvdock.errors import RegionError
from kvdock.pools.spec import HitPolicy
from kvdock.transfer.bounded_executor import Lane
from kvdock.transfer.leases import Side
from kvdock.transfer.prefetch import Prefetch
from kvdock.transfer.result import (NO_PAGE, Moved)
from kvdock.transfer.futures import (Ticket, TicketState)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvdock.region import Int64s
    from kvdock.transfer.attachment import Attachment


Ended = Callable[[Ticket], None]


class Session:
    """Background transfers over an attachment, which it closes with itself."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._core = attachment.core
        given = self._core.transfers
        self._reads = Lane("kvdock-read", given.readers, given.queue)
        self._writes = Lane("kvdock-write", given.writers, given.queue)

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session."""
        self.close()

    def prefetch(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        windows: Mapping[str, npt.ArrayLike] | None = None,
        ended: Ended | None = None,
    ) -> Ticket:
        """Load a prefix in the background.

        Args:
            hashes: Page hashes of a prefix that `exists` called restorable.
            pages: As for `Attachment.get`.
            windows: Pool name to spare pages for a trailing window. They are
                given to the window's positions once the boundary is known;
                such a pool is left out of `pages`.
            ended: Called once when it is over, on the worker's thread.

        Returns:
            A ticket, which is REFUSED if the queue is full.

        Raises:
            KvdockError: On bad input, at once.
        """
        spare = {
            name: self._checked_window(name, given)
            for name, given in (windows or {}).items()
        }
        nowhere = np.full(len(hashes), NO_PAGE)
        where = self.attachment.places(
            hashes, {**dict.fromkeys(spare, nowhere), **pages}
        )
        touched = {
            name: np.concatenate([own[own != NO_PAGE], spare.get(name, nowhere[:0])])
            for name, own in where.items()
        }
        ticket = self._ticket(len(hashes), ended)
        job = Prefetch(self.attachment, list(hashes), where, spare)
        return self._submit(self._reads, ticket, job.run, touched)

    def offload(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        ended: Ended | None = None,
    ) -> Ticket:
        """Store pages in the background: sidecars first, the anchor last.

        The pages must keep their bytes until the ticket is done and
        `Attachment.leases` says that they are no longer busy.

        Args:
            hashes: Page hashes, in order.
            pages: As for `Attachment.put`.
            ended: Called once when it is over, on the worker's thread.

        Returns:
            A ticket, which is REFUSED if the queue is full.

        Raises:
            KvdockError: On bad input, at once.
        """
        where = self.attachment.places(hashes, pages)
        touched = {name: own[own != NO_PAGE] for name, own in where.items()}
        ticket = self._ticket(len(hashes), ended)
        job = _Offload(self.attachment, list(hashes), where)
        return self._submit(self._writes, ticket, job.run, touched)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; return whether it is so."""
        deadline_s = time.monotonic() + timeout_s
        return self._writes.drain(deadline_s) and self._reads.drain(deadline_s)

    def close(self) -> bool:
        """Finish what can be finished, and let go of everything.

        Ends within `core.deadlines.close`: reads are cancelled at once,
        writes get half of the time to drain, releasing gets the rest.

        Returns:
            Whether every call has ended.
        """
        timeout_s = self._core.deadlines.close
        deadline_s = time.monotonic() + timeout_s
        self._reads.close()
        self._writes.drain(deadline_s - timeout_s / 2)
        self._writes.close()
        ended = self.attachment.close(max(0.0, deadline_s - time.monotonic()))
        joined = [lane.join(deadline_s) for lane in (self._reads, self._writes)]
        return ended and all(joined)

    def _ticket(self, pages: int, ended: Ended | None) -> Ticket:
        first = next(iter(self.attachment.berths.values())).pool
        tokens = pages * first.page_tokens
        return Ticket(pages, tokens, self._core.transfers, ended)

    def _submit(
        self,
        lane: Lane,
        ticket: Ticket,
        work: Callable[[Ticket], Moved | None],
        touched: Mapping[str, Int64s],
    ) -> Ticket:
        books = [
            (berth.leases, touched[name])
            for name, berth in self.attachment.berths.items()
            if berth.pool.physical
        ]

        def refer(references: int) -> None:
            for book, pages in books:
                book.refer(Side.HOST, pages, references)

        refer(1)
        if not lane.submit(ticket, work, lambda: refer(-1)):
            refer(-1)
            ticket.end(None, TicketState.REFUSED)
        return ticket

    def _checked_window(self, name: str, given: npt.ArrayLike) -> Int64s:
        berth = self.attachment.berths.get(name)
        if berth is None or berth.pool.hit_policy is not HitPolicy.TRAILING_PAGES:
            raise RegionError(
                f"spare pages are given for {name!r}, which is no attached pool "
                "with a trailing window"
            )
        pages = berth.region.check(given)
        if len(pages) < berth.pool.window_pages:
            raise RegionError(
                f"pool {name!r}: {len(pages)} spare pages for a window of "
                f"{berth.pool.window_pages}"
            )
        return pages


@attrs.frozen(eq=False)
class _Offload:
    """Storing, in batches."""

    attachment: Attachment
    hashes: list[str]
    where: Mapping[str, Int64s]

    def run(self, ticket: Ticket) -> Moved:
        """Store batch by batch until done, stopped, or nothing gets through."""
        count = len(self.hashes)
        outcomes = {
            name: np.full(count, Outcome.ABSENT, np.uint8) for name in self.where
        }
        nbytes = dict.fromkeys(self.where, 0)
        prefix, whole = 0, True
        step = self.attachment.core.transfers.batch_pages
        anchor = self.attachment.plan.anchor.pool.name
        for start in range(0, count, step):
            if ticket.stopping:
                break
            part = slice(start, start + step)
            moved = self.attachment.put(
                self.hashes[part], {name: own[part] for name, own in self.where.items()}
            )
            for name, codes in moved.outcomes.items():
                outcomes[name][part] = codes
                nbytes[name] += moved.nbytes[name]
            if whole:
                prefix = start + moved.pages
                whole = prefix == min(start + step, count)
                ticket.advance(prefix)
            if _stuck(moved, anchor):
                # Full, cut off, or no sidecar got through: more would not.
                break
        return Moved(prefix, outcomes, nbytes, self.where)


def _stuck(moved: Moved, anchor: str) -> bool:
    """Return whether nothing of what counts was stored, though it was given."""
    tried = {
        name: codes[moved.places[name] != NO_PAGE]
        for name, codes in moved.outcomes.items()
    }
    # A stage without a layer of the anchor has none, and a batch may give none.
    lead = tried.get(anchor, ())
    every = np.concatenate([lead] if len(lead) else list(tried.values()))
    return bool(len(every)) and bool((every != Outcome.OK).all())
