"""Retention: how long pages are kept at the least, and served at the most.

A promise is a number of bytes until a time. A backend gives it within a budget and
then keeps it, whatever makes room: eviction, another pool, a restart. Expiry is the
opposite: from a time on a page is not served any more, and its bytes go soon after.

Both are times on the host's clock, in whole seconds since 1970, because they outlive
the process that set them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Self

import attrs
import numpy as np

from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
from kvdock.errors import KvdockError

LATEST = 2**32 - 1
"""The latest time that is stored, in 2106; what is asked for beyond it is clipped."""


class RetentionAnswer(IntEnum):
    """What became of a promise or an expiry, for one page."""

    ACCEPTED = 0
    """It holds from now on."""
    CLIPPED = 1
    """The page is stored without a promise, or with one for less time: the budget is
    spent, or another process is writing beside it."""
    ABSENT = 2
    """There is no such page."""
    UNSUPPORTED = 3
    """No backend of the pool can do that. A page that cannot expire is not stored."""


@attrs.frozen
class Retention:
    """Until when pages are kept and served.

    Args:
        keep_until: Not evicted before, seconds since 1970; 0 for no promise.
        expire_at: Not served from then on, seconds since 1970; 0 for never.
    """

    keep_until: int = 0
    expire_at: int = 0

    def __bool__(self) -> bool:
        """Return whether anything is asked for."""
        return bool(self.keep_until or self.expire_at)

    def no_longer_than(self, max_age_s: float) -> Retention:
        """Return the same for pages that no one is served after an age; 0 for any."""
        if not max_age_s:
            return self
        latest = self.lasting(max_age_s=max_age_s).expire_at
        end = min(self.expire_at or latest, latest)
        return Retention(min(self.keep_until, end), end)

    @classmethod
    def lasting(
        cls,
        keep_s: float | None = None,
        expire_s: float | None = None,
        max_age_s: float = 0,
    ) -> Self:
        """Count from now: promises are rounded up to seconds, expiry down.

        Args:
            keep_s: How long pages are kept at the least; None for no promise.
            expire_s: How long they are served at the most; None for ever.
            max_age_s: The same for all pages of an engine; 0 for ever.

        Raises:
            KvdockError: If a duration is negative or not a number.
        """
        for what, seconds in (("keep_s", keep_s), ("expire_s", expire_s)):
            if seconds is not None and not seconds >= 0:
                raise KvdockError(
                    f"{what} is {seconds}", fix="Give seconds, 0 or more."
                )
        now = time.time()
        ends = [one for one in (expire_s, max_age_s or None) if one is not None]
        # A time of 0 would mean that they never expire.
        expire_at = max(1, _within(now + min(ends))) if ends else 0
        keep_until = 0 if not keep_s else _within(math.ceil(now + keep_s))
        if expire_at:
            keep_until = min(keep_until, expire_at)
        return cls(keep_until, expire_at)


def _within(seconds: float) -> int:
    return LATEST if seconds >= LATEST else int(seconds)


def combined(answers: Iterable[OutcomeArray], pages: int) -> OutcomeArray:
    """Return one answer for each page of several pools or tiers, uint8 (pages,).

    The worst of those that have the page. What none of them has is ABSENT.
    """
    worst = np.full(pages, RetentionAnswer.ABSENT, np.uint8)
    for one in answers:
        fresh = worst == RetentionAnswer.ABSENT
        there = one != RetentionAnswer.ABSENT
        worst = np.where(there, np.where(fresh, one, np.maximum(worst, one)), worst)
    return worst


@attrs.frozen(eq=False)
class StoredTimes:
    """What a backend has of some pages now, whichever process stored them.

    Args:
        there: bool (n,), which pages are stored.
        expire_at: int64 (n,), when they expire, as far as the backend keeps times; 0
            for never.
        kept: bool (n,), which are promised.
    """

    there: BoolArray
    expire_at: Int64Array
    kept: BoolArray


@attrs.define(eq=False)
class CallTimes:
    """Times of the pages of one call: what is asked for, and what was found.

    Args:
        asked: What a PUT asks for.
        kept: Page hashes that a PUT stored with the promise.
        expire_at: By page hash, when pages of a GET expire; those that do.
    """

    asked: Retention = attrs.field(factory=Retention)
    kept: set[str] = attrs.field(factory=set)
    expire_at: dict[str, int] = attrs.field(factory=dict)

    def note_kept(self, hashes: Sequence[str], kept: BoolArray | None) -> None:
        """Take over which objects a batch stored with the promise, bool (n,)."""
        if kept is not None:
            whole = np.flatnonzero(kept.reshape(len(hashes), -1).all(axis=1))
            self.kept.update(hashes[at] for at in whole.tolist())

    def note_expiry(self, hashes: Sequence[str], expire_at: Int64Array | None) -> None:
        """Take over when the objects of a batch expire, int64 (n,), 0 for never."""
        if expire_at is not None and expire_at.any():
            # The first of a page's objects to go takes the page with it.
            ends = np.where(expire_at == 0, LATEST, expire_at)
            first = ends.reshape(len(hashes), -1).min(axis=1).tolist()
            timed = zip(hashes, first, strict=True)
            self.expire_at.update((one, at) for one, at in timed if at < LATEST)
