"""Which prefixes can be restored from the pages that exist.

Evaluated once, here, for every backend: backends only say which keys exist.
The answer is a set. A minimum of each pool's best prefix would be wrong: with
attention pages up to 4 and states at 2 and 5, it says 4, where only 2 works.
The same holds between ranks, so they intersect their sets as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import BoolArray, Int32Array
from kvdock.errors import PoolError
from kvdock.pools.enums import HitPolicy

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec

ReduceMin = Callable[[Int32Array], Int32Array | None]
"""An all-reduce: the element-wise minimum over ranks, returned or in place."""


@attrs.frozen(eq=False)
class Hits:
    """What a lookup found.

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
    restorable = np.ones(pages + 1, np.bool_)
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
        if np.count_nonzero(there) == pages and (
            pool.hit_policy is not HitPolicy.BLOCK_GROUPS
        ):
            # All pages are there: every prefix is allowed.
            found[pool.name] = pages
            continue
        allowed = allowed_prefixes(pool, there)
        found[pool.name] = _last(allowed)
        if pool.required:
            restorable &= allowed
    return Hits(found, restorable)


def intersect(restorable: Sequence[BoolArray]) -> BoolArray:
    """Return the prefixes that every rank can restore.

    Args:
        restorable: bool (n + 1,) of each rank, at least one.

    Raises:
        PoolError: If ranks were asked about different prefixes.
    """
    lengths = {len(one) for one in restorable}
    if len(lengths) != 1:
        raise PoolError(f"ranks answered about {sorted(lengths)} prefixes")
    return reduce(np.logical_and, restorable)


def agree(
    hits: Hits | None, pages: int, pools: Sequence[str], reduce_min: ReduceMin
) -> Hits:
    """Agree with all ranks on what can be restored, in one collective.

    Called on every rank for every lookup, also where the lookup failed, so
    that no rank waits for another: exactly one call of `reduce_min`, with an
    array whose length depends on the arguments alone.

    Args:
        hits: What this rank found; None if its lookup failed.
        pages: Length of the prefix, the same on every rank.
        pools: Names of all pools of the deployment, the same on every rank
            and in the same order. A pool that a rank does not have, such as
            one of another pipeline stage, is cut by those that have it.
        reduce_min: The collective.

    Returns:
        The prefixes that all ranks can restore, and for each pool the least
        that a rank found.

    Raises:
        PoolError: If this rank's hits are about another prefix; raised after
            the collective, in which this rank then reports nothing.
    """
    fits = hits is None or len(hits.restorable) == pages + 1
    own = hits if hits is not None and fits else Hits.nothing(pages)
    missing = pages if hits is not None and fits else 0
    vector = np.empty(pages + 1 + len(pools), np.int32)
    vector[: pages + 1] = own.restorable
    vector[pages + 1 :] = [own.found.get(name, missing) for name in pools]
    reduced = reduce_min(vector)
    agreed = vector if reduced is None else np.asarray(reduced)
    if hits is not None and not fits:
        raise PoolError(
            f"hits about {len(hits.restorable) - 1} pages where {pages} were asked for"
        )
    if agreed.shape != vector.shape:
        raise PoolError(
            f"the collective turned {vector.shape} numbers into {agreed.shape}"
        )
    found = dict(zip(pools, agreed[pages + 1 :].tolist(), strict=True))
    return Hits(found, agreed[: pages + 1].astype(np.bool_))
