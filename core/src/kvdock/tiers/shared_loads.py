"""Shared loads: a far page is loaded once for all calls that ask for it.

The first call that asks loads the page into a row of the core's memory, and each call
copies it from there into its own page: an engine's page could be reused meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.batch import Outcome
from kvdock.synchronization import new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.tiers.rows import RowChunks

Fetch = Callable[[Sequence[str], "Int64Array"], "OutcomeArray"]
"""Loads pages into rows; returns an outcome for each."""
Deliver = Callable[["Int64Array", "Int64Array"], "OutcomeArray"]
"""Copies rows to the pages at some positions of the call."""

_OK = int(Outcome.OK)


@attrs.define(eq=False)
class _Load:
    """Pages that one call loads into a chunk, and the calls that use it."""

    rows: Int64Array
    users: int = 1
    codes: OutcomeArray | None = None


class SharedLoads:
    """The loads from one tier that are under way, of one pool."""

    def __init__(self, chunks: RowChunks) -> None:
        self._chunks = chunks
        self._lock, self._landed = new_condition()
        self._under_way: dict[str, tuple[_Load, int]] = {}

    def load(
        self,
        hashes: Sequence[str],
        deadline_s: float,
        fetch: Fetch,
        deliver: Deliver,
    ) -> tuple[OutcomeArray, BoolArray]:
        """Load pages, or wait for those that another call loads.

        Returns:
            An outcome for each, uint8 (n,), and bool (n,), for which there was no
            memory: they were not asked for.
        """
        outcomes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
        left = np.zeros(len(hashes), np.bool_)
        awaited: list[tuple[int, _Load, int]] = []
        try:
            for start in range(0, len(hashes), self._chunks.chunk_rows):
                part = range(start, min(start + self._chunks.chunk_rows, len(hashes)))
                mine, load = self._claim(hashes, part, awaited)
                at = np.array(mine, np.int64)
                if load is None:
                    left[at] = True
                elif remaining_s(deadline_s) <= 0:
                    self._land(hashes, mine, load, outcomes[:0])
                    outcomes[at] = Outcome.TIMEOUT
                else:
                    outcomes[at] = self._load(hashes, mine, load, fetch, deliver)
            for position, load, row in awaited:
                code = self._await(load, row, deadline_s)
                outcomes[position] = code
                if code == _OK:
                    got = deliver(np.array([position]), load.rows[row : row + 1])
                    outcomes[position] = got[0]
        finally:
            for _, load, _ in awaited:
                self._leave(load)
        return outcomes, left

    def _claim(
        self,
        hashes: Sequence[str],
        part: Sequence[int],
        awaited: list[tuple[int, _Load, int]],
    ) -> tuple[list[int], _Load | None]:
        """Return the positions that this call loads, and where to."""
        mine: list[int] = []
        with self._lock:
            for at in part:
                known = self._under_way.get(hashes[at])
                if known is None:
                    mine.append(at)
                    continue
                known[0].users += 1
                awaited.append((at, *known))
            rows = self._chunks.take() if mine else None
            if rows is None:
                return mine, None
            load = _Load(rows)
            for row, at in enumerate(mine):
                # A hash that is given twice is loaded to its last row.
                self._under_way[hashes[at]] = load, row
        return mine, load

    def _load(
        self,
        hashes: Sequence[str],
        mine: Sequence[int],
        load: _Load,
        fetch: Fetch,
        deliver: Deliver,
    ) -> OutcomeArray:
        codes = np.full(len(mine), Outcome.ERROR, np.uint8)
        try:
            try:
                codes = fetch([hashes[at] for at in mine], load.rows[: len(mine)])
            finally:
                self._land(hashes, mine, load, codes)
            good = np.flatnonzero(codes == _OK)
            found = codes.copy()
            if len(good):
                found[good] = deliver(np.array(mine)[good], load.rows[good])
        finally:  # an interrupted load too must not keep its chunk
            self._leave(load)
        return cast("OutcomeArray", found)

    def _land(
        self,
        hashes: Sequence[str],
        mine: Sequence[int],
        load: _Load,
        codes: OutcomeArray,
    ) -> None:
        """Tell those that wait how a load ended; no others join it."""
        with self._lock:
            load.codes = codes
            for at in mine:
                self._under_way.pop(hashes[at], None)
            self._landed.notify_all()
        if not len(codes):
            self._leave(load)

    def _await(self, load: _Load, row: int, deadline_s: float) -> int:
        with self._lock:
            self._landed.wait_for(
                lambda: load.codes is not None, remaining_s(deadline_s)
            )
            if load.codes is None or row >= len(load.codes):
                return int(Outcome.TIMEOUT)
            return int(load.codes[row])

    def _leave(self, load: _Load) -> None:
        with self._lock:
            load.users -= 1
            last = not load.users
        if last:
            self._chunks.release(load.rows)
