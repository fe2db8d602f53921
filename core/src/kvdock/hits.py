"""Evaluate which prefixes can be restored from the pages that exist.

Evaluated once, here, for every backend: backends only say which keys exist.
The answer is a set. A minimum of each pool's best prefix would be wrong: with
attention pages up to 4 and states at 2 and 5, it says 4, where only 2 works.
The same holds between ranks: an engine whose ranks each ask intersects their sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import all_of
from kvdock.errors import PoolError
from kvdock.pools.enums import HitPolicy

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray
    from kvdock.pools.spec import PoolSpec


@attrs.frozen(eq=False)
class Hits:
    """The result of a lookup.

    Args:
        found: Pool name to the longest prefix that this pool alone allows.
        restorable: bool (n + 1,); entry p says whether a prefix of p pages
            can be restored. Entry 0 is true.
    """

    found: Mapping[str, int]
    restorable: BoolArray = attrs.field(repr=False)

    @classmethod
    def nothing(cls, pages: int) -> Hits:
        """Return the answer of a lookup that failed."""
        restorable = np.zeros(pages + 1, np.bool_)
        restorable[0] = True
        return cls({}, restorable)

    @property
    def best(self) -> int:
        """Pages of the longest prefix that can be restored."""
        return _last(self.restorable)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """All restorable prefix lengths but 0, ascending."""
        return tuple(int(p) for p in np.flatnonzero(self.restorable) if p)


def _last(allowed: BoolArray) -> int:
    """Return the place of the last true entry; entry 0 is always true."""
    return len(allowed) - 1 - int(allowed[::-1].argmax())


def allowed_prefixes(pool: PoolSpec, exists: BoolArray) -> BoolArray:
    """Return which prefixes one pool allows.

    Args:
        pool: The pool, for its hit policy.
        exists: bool (n,), whether page i is there.

    Returns:
        bool (n + 1,); entry p is about a prefix of p pages.
    """
    pages = len(exists)
    allowed = np.ones(pages + 1, np.bool_)
    match pool.hit_policy:
        case HitPolicy.ALL_PAGES:
            allowed[leading(exists) + 1 :] = False
        case HitPolicy.TRAILING_PAGES:
            # A prefix of p needs [p - window, p): nothing missing since then.
            ends = np.arange(1, pages + 1, dtype=np.int32)
            gone = np.maximum.accumulate(np.where(exists, np.int32(0), ends))
            # A window may be wider than int32; no prefix here is.
            window = min(pool.window_pages, pages)
            allowed[1:] = gone <= np.maximum(ends - window, 0)
        case HitPolicy.BLOCK_GROUPS:
            # Only the ends of blocks are prefixes that this form can restore.
            block = pool.block_pages
            rows = exists[: pages // block * block].reshape(-1, block)
            whole: BoolArray = np.all(rows[:, block - pool.group_pages :], axis=1)
            allowed[1:] = False
            allowed[block : leading(whole) * block + 1 : block] = True
    return allowed


def leading(exists: BoolArray) -> int:
    """Return how many entries are true before the first that is not."""
    if not len(exists):
        return 0
    first = int(exists.argmin())
    return len(exists) if exists[first] else first


def evaluate(
    pools: Sequence[PoolSpec], exists: Mapping[str, npt.ArrayLike], pages: int
) -> Hits:
    """Intersect what all required pools allow.

    Args:
        pools: All pools that have a route. Optional ones are reported and cut
            nothing. A logical anchor exists unless its pages are given.
        exists: Pool name to bool (pages,).
        pages: Length of the prefix that was asked for.

    Raises:
        PoolError: If a pool's answer is missing or has another length.
    """
    restorable = np.empty(pages + 1, np.bool_)
    restorable.fill(True)
    found: dict[str, int] = {}
    for pool in pools:
        answer = exists.get(pool.name)
        if answer is None:
            if pool.physical:
                raise PoolError(f"the pages of {pool.name!r} that exist are not given")
            answer = np.ones(pages, np.bool_)
        there: BoolArray = np.asarray(answer, np.bool_)
        if there.shape != (pages,):
            raise PoolError(
                f"pool {pool.name!r}: {there.shape} answers for {pages} pages"
            )
        if all_of(there) and (pool.hit_policy is not HitPolicy.BLOCK_GROUPS):
            # All pages are there: every prefix is allowed.
            found[pool.name] = pages
            continue
        allowed = allowed_prefixes(pool, there)
        found[pool.name] = _last(allowed)
        if pool.required:
            restorable &= allowed
    return Hits(found, restorable)
