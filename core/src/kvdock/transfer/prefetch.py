"""Loading a prefix in batches, and settling its trailing windows last."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.batch import (Operation, Outcome, Outcomes)
from kvdock.hits import evaluate
from kvdock.pools.spec import HitPolicy
from kvdock.transfer.page_indices import (move, named_again)
from kvdock.transfer.result import (NO_PAGE, Moved)

if TYPE_CHECKING:
    from kvdock.hits import Bools
    from kvdock.region import Int64s
    from kvdock.transfer.attachment import Attachment
    from kvdock.transfer.attached_pool import Berth
    from kvdock.transfer.futures import Ticket

_TRIES = 3
"""Boundaries that are tried until every trailing window is whole."""


@attrs.define(eq=False)
class Prefetch:
    """One prefix on its way into memory.

    Args:
        attachment: The pools.
        hashes: The n page hashes.
        where: Pool name to int64 (n,), the page of each position.
        spare: Pool name to pages for a trailing window.
    """

    attachment: Attachment
    hashes: list[str]
    where: dict[str, Int64s]
    spare: Mapping[str, Int64s]
    _berths: Mapping[str, Berth] = attrs.field(init=False)
    _outcomes: dict[str, Outcomes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with nothing loaded, and one position for each page."""
        self._berths = self.attachment.berths
        for name, berth in self._berths.items():
            if berth.pool.physical and not _trailing(berth):
                own = self.where[name]
                self.where[name] = np.where(named_again(own), NO_PAGE, own)
        self._outcomes = {
            name: np.full(len(self.hashes), Outcome.ABSENT, np.uint8)
            for name in self._berths
        }

    def run(self, ticket: Ticket) -> Moved | None:
        """Load until done, stopped, or the prefix is cut."""
        reach = self._load_prefix(ticket)
        if ticket.cancelled:
            return None
        self._settle_windows(reach)
        return self._result(reach)

    def _load_prefix(self, ticket: Ticket) -> int:
        """Load the anchor and all pools that every page needs."""
        transfers = self.attachment.core.transfers
        running = [b for b in self._berths.values() if not _trailing(b)]
        running.sort(key=lambda berth: not berth.pool.anchor)
        reach = 0
        for start in range(0, len(self.hashes), transfers.batch_pages):
            if ticket.stopping:
                break
            stop = min(start + transfers.batch_pages, len(self.hashes))
            run = self._load_batch(running, start, stop)
            reach = start + run
            ticket.advance(reach)
            if reach < stop:
                break
        return reach

    def _load_batch(self, running: list[Berth], start: int, stop: int) -> int:
        """Load positions start to stop; return how many are whole."""
        run = stop - start
        deadline_s = time.monotonic() + self.attachment.core.deadlines.get
        for berth in running:
            own = self.where[berth.pool.name]
            chosen = start + np.flatnonzero(own[start : start + run] != NO_PAGE)
            codes = move(Operation.GET, berth, self.hashes, (own, chosen), deadline_s)
            mine = self._outcomes[berth.pool.name][start:stop]
            mine[:run] = codes[start : start + run]
            if berth.pool.required and not berth.pool.block_pages:
                # Sidecars are read only as far as those before were.
                run = int(np.logical_and.accumulate(mine == Outcome.OK).sum())
        return run

    def _settle_windows(self, reach: int) -> None:
        """Find a boundary whose trailing windows can be loaded, and do it."""
        trailing = [berth for berth in self._berths.values() if _trailing(berth)]
        if not trailing or not reach:
            return
        there = self._loaded()
        names = self.hashes[:reach]
        deadline_s = time.monotonic() + self.attachment.core.deadlines.get
        for berth in trailing:
            exists = berth.exists(names, deadline_s)
            if berth.pool.name not in self.spare:
                exists &= self.where[berth.pool.name][:reach] != NO_PAGE
            there[berth.pool.name][:reach] = exists
        for _ in range(_TRIES):
            best = self._best(there, reach)
            if not best:
                return
            for berth in trailing:
                self._load_window(berth, best, there[berth.pool.name], deadline_s)
            if self._best(there, reach) == best:
                return

    def _load_window(
        self, berth: Berth, boundary: int, there: Bools, deadline_s: float
    ) -> None:
        """Load the window before a boundary; what fails is not there."""
        name = berth.pool.name
        first = max(0, boundary - berth.pool.window_pages)
        window = np.arange(first, boundary)
        if name in self.spare:
            self.where[name] = np.full(len(self.hashes), NO_PAGE)
            self.where[name][window] = self.spare[name][: len(window)]
            self._outcomes[name][:] = Outcome.ABSENT
        own = self.where[name]
        wanted = window[there[window] & (self._outcomes[name][window] != Outcome.OK)]
        codes = move(Operation.GET, berth, self.hashes, (own, wanted), deadline_s)
        self._outcomes[name][wanted] = codes[wanted]
        there[wanted] = codes[wanted] == Outcome.OK

    def _loaded(self) -> dict[str, Bools]:
        return {
            name: cast("Bools", codes == Outcome.OK)
            for name, codes in self._outcomes.items()
        }

    def _best(self, there: Mapping[str, Bools], reach: int) -> int:
        pools = [berth.pool for berth in self._berths.values()]
        hits = evaluate(pools, there, len(self.hashes))
        return int(np.flatnonzero(hits.restorable[: reach + 1])[-1])

    def _result(self, reach: int) -> Moved:
        loaded = self._loaded()
        best = self._best(loaded, reach)
        self.attachment.tell_restored(loaded, best)
        nbytes = {
            name: int(ok.sum()) * self._berths[name].page_bytes
            for name, ok in loaded.items()
        }
        return Moved(best, self._outcomes, nbytes, self.where)


def _trailing(berth: Berth) -> bool:
    return berth.pool.hit_policy is HitPolicy.TRAILING_PAGES
