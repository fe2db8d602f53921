"""Chain: the pages of one pool over its tiers, near first.

A lookup asks the nearest tier first and each further one for the rest. A load takes
each page from the nearest tier that has it whole; what is wrong there is deleted, and
comes from the next one within the same deadline. A store is OK if one tier has the
page; the other tiers get it later, as a copy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.config.tiers import Promote, Tier, Write
from kvdock.tiers.copier import CopiedPool, Copier, Copy
from kvdock.tiers.placed import NO_PAGE
from kvdock.tiers.uses import Uses

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.config.core import TierSettings
    from kvdock.tiers.placed import Placed, RowMover
    from kvdock.tiers.shared_loads import SharedLoads

_OK = int(Outcome.OK)
_ABSENT = int(Outcome.ABSENT)


@attrs.frozen
class EnginePages:
    """The engine's pages of the pool.

    Args:
        move: Stores pages in the tier at a position, or loads them from there, until
            a deadline.
        deliver: Copies rows of the core's memory to pages, unless a deadline is over.
        keep_until: Until when copies of what is stored are promised, seconds since
            1970; 0 for no promise.
    """

    move: Callable[[int, Operation, Sequence[str], Int64Array, float], OutcomeArray]
    deliver: Callable[[Int64Array, Int64Array, float], OutcomeArray]
    keep_until: int = 0


@attrs.frozen(eq=False)
class Chain:
    """The tiers of one pool.

    Args:
        tiers: Its placements, near first; two at least.
        settings: What lookups and copies may cost.
        writes: Whether this rank stores its pages.
        shared: By tier behind the nearest: loads that several calls share, None where
            each call loads for itself; empty for a pool without bytes.
    """

    pool: CopiedPool
    tiers: Sequence[Placed]
    settings: TierSettings
    copier: Copier = attrs.field(repr=False)
    writes: bool
    shared: Sequence[SharedLoads | None] = attrs.field(repr=False)
    _uses: Uses = attrs.field(init=False, repr=False)
    _found_in: dict[str, int] = attrs.field(init=False, repr=False, factory=dict)

    @_uses.default
    def _no_uses(self) -> Uses:
        return Uses(self.settings.uses)

    def find(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Return which pages one of the tiers has."""
        near = self.tiers[0]
        found = near.find(hashes, near.until(deadline_s))
        for at, tier in enumerate(self.tiers[1:], 1):
            rest = np.flatnonzero(~found)
            if not len(rest):
                break
            until_s = min(deadline_s, time.monotonic() + self.settings.lookup)
            names = _at(hashes, rest)
            there = found[rest] = tier.find(names, until_s)
            self._note_found(at, _at(names, np.flatnonzero(there)))
        return found

    def _note_found(self, at: int, hashes: Sequence[str]) -> None:
        """Remember for the load that follows in which tier pages were found."""
        if len(self._found_in) > self.settings.uses:
            self._found_in.clear()
        self._found_in.update(dict.fromkeys(hashes, at))

    def found_in(self, hashes: Sequence[str]) -> Int64Array:
        """Return the tier in which each page was found last, int64 (n,)."""
        return np.array([self._found_in.get(one, 0) for one in hashes], np.int64)

    def load(
        self,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        engine: EnginePages,
    ) -> OutcomeArray:
        """Load each page from the nearest tier that has it whole.

        Args:
            hashes: The n page hashes.
            pages: int64 (n,), the page of each, given once; `NO_PAGE` for none.
            deadline_s: Until when, over all tiers.
            engine: Its pages.

        Returns:
            OK for what one tier gave; else what the nearest one answered that is
            more than ABSENT.
        """
        outcomes = np.full(len(hashes), _ABSENT, np.uint8)
        # Noted once: a page that is promoted meanwhile is found nearer next time.
        first = np.zeros(len(hashes), np.int64)
        if self._found_in:
            first[:] = [self._found_in.pop(one, 0) for one in hashes]
        turns = [(at, False) for at in range(len(self.tiers))]
        if first.any():  # what is not where it was found is looked for everywhere
            turns += [(at, True) for at in range(int(first.max()))]
        for at, again in turns:
            tier = self.tiers[at]
            mine = first > at if again else first <= at
            wanted = np.flatnonzero((pages != NO_PAGE) & (outcomes != _OK) & mine)
            if not len(wanted):
                continue
            asked, own = _at(hashes, wanted), pages[wanted]
            until_s = tier.until(deadline_s)
            shared = self.shared[at - 1] if at and self.shared else None
            if shared is not None and tier.loads is not None:
                through = (shared, tier.loads)
                found = self._load_shared(
                    at, through, asked, own, until_s, engine=engine
                )
            else:
                found = engine.move(at, Operation.GET, asked, own, until_s)
            good = found == _OK
            better = good | (outcomes[wanted] == _ABSENT)
            outcomes[wanted[better]] = found[better]
            if at and good.any():
                self._promote(at, _at(asked, np.flatnonzero(good)))
        return outcomes

    def _load_shared(
        self,
        at: int,
        through: tuple[SharedLoads, RowMover],
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        *,
        engine: EnginePages,
    ) -> OutcomeArray:
        """Load pages that other hosts share, once for all calls that ask."""
        shared, tier = through

        def fetch(names: Sequence[str], rows: Int64Array) -> OutcomeArray:
            codes = np.full(len(names), Outcome.TIMEOUT, np.uint8)
            for start in range(0, len(names), tier.batch_pages):
                part = slice(start, start + tier.batch_pages)
                if tier.rejects(Operation.GET, names[part]):
                    codes[part] = Outcome.UNAVAILABLE
                elif time.monotonic() < deadline_s:
                    codes[part] = tier.move_rows(
                        Operation.GET, names[part], rows[part], deadline_s
                    )
            return codes

        outcomes, left = shared.load(
            hashes,
            deadline_s,
            fetch,
            lambda some, rows: engine.deliver(pages[some], rows, deadline_s),
        )
        if left.any():
            rest = np.flatnonzero(left)
            names, own = _at(hashes, rest), pages[rest]
            outcomes[rest] = engine.move(at, Operation.GET, names, own, deadline_s)
        return outcomes

    def _promote(self, found_at: int, hashes: Sequence[str]) -> None:
        """Copy pages that were loaded from a tier to those before it."""
        again = self._uses.note(hashes)
        for tier in self.tiers[:found_at]:
            rule = _rule(tier).promote
            if rule is Promote.ALWAYS:
                self._copy(found_at, tier, hashes, promoted=True)
            elif rule is Promote.SECOND and any(again):
                names = [one for one, used in zip(hashes, again, strict=True) if used]
                self._copy(found_at, tier, names, promoted=True)

    def prefetch(self, hashes: Sequence[str], deadline_s: float) -> dict[str, int]:
        """Copy pages of the tiers behind to the nearest; return how many ended how.

        They are copied in the background, whatever the rules of promotion say: they
        were asked for.
        """
        counts = Counter[str]()
        left = list(hashes)
        for at, tier in enumerate(self.tiers):
            there = tier.find(left, deadline_s).tolist() if left else []
            names = [one for one, had in zip(left, there, strict=True) if had]
            left = [one for one, had in zip(left, there, strict=True) if not had]
            moved = at and self._copy(at, self.tiers[0], names, promoted=True)
            counts["queued" if moved else "unsupported" if at else "present"] += len(
                names
            )
        counts["absent"] += len(left)
        return {answer: pages for answer, pages in counts.items() if pages}

    def store(
        self,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        engine: EnginePages,
    ) -> OutcomeArray:
        """Store pages in the tiers that are written at once, and copy them behind.

        A page that none of those took is stored in the next tier in this call.
        Arguments are those of `load`.

        Returns:
            OK for what one tier took; else what the nearest one answered.
        """
        outcomes = np.full(len(hashes), _ABSENT, np.uint8)
        given = pages != NO_PAGE
        stored = np.zeros((len(self.tiers), len(hashes)), np.bool_)
        for write in (Write.THROUGH, Write.BEHIND):
            for at, tier in enumerate(self.tiers):
                if _rule(tier).write is not write:
                    continue
                wanted = given & (outcomes != _OK) if write is Write.BEHIND else given
                if not wanted.any():
                    continue
                own = np.where(wanted, pages, NO_PAGE)
                until_s = tier.until(deadline_s)
                self.copier.spare(self.pool.name, tier.backend, hashes)
                found = engine.move(at, Operation.PUT, hashes, own, until_s)
                stored[at] = found == _OK
                better = wanted & (stored[at] | (outcomes == _ABSENT))
                outcomes[better] = found[better]
        if self.writes:
            self._copy_behind(hashes, stored, engine.keep_until)
        return outcomes

    def _copy_behind(
        self, hashes: Sequence[str], stored: BoolArray, keep_until: int
    ) -> None:
        somewhere = stored.any(axis=0)
        source = stored.argmax(axis=0)
        for at, tier in enumerate(self.tiers):
            if _rule(tier).write is not Write.BEHIND:
                continue
            lacking = somewhere & ~stored[at]
            for of in np.unique(source[lacking]).tolist():
                names = _at(hashes, np.flatnonzero(lacking & (source == of)))
                self._copy(of, tier, names, promoted=False, keep_until=keep_until)

    def _copy(
        self,
        source: int,
        target: Placed,
        hashes: Sequence[str],
        *,
        promoted: bool,
        keep_until: int = 0,
    ) -> bool:
        """Queue a copy; return whether both tiers have memory for copies."""
        has, wants = self.tiers[source].copies, target.copies
        if has is None or wants is None:
            return False
        others = [
            one.copies
            for one in self.tiers
            if one.copies is not None and one.copies not in (has, wants)
        ]
        names = list(hashes)
        self.copier.submit(
            Copy(self.pool, has, wants, names, promoted, others, keep_until)
        )
        return True


def _rule(tier: Placed) -> Tier:
    """Return a tier's rule; without one it is written at once."""
    return tier.tier or Tier(tier.backend, Write.THROUGH, Promote.NEVER)


def _at(hashes: Sequence[str], positions: Iterable[int]) -> Sequence[str]:
    return [hashes[at] for at in positions]
