"""Which prefixes can be restored from the pages that exist.

Evaluated once, here, for every backend: backends only say which keys exist.
The answer is a set. A minimum of each pool's best prefix would be wrong: with
attention pages up to 4 and states at 2 and 5, it says 4, where only 2 works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import PoolError
from kvdock.pools import HitPolicy, PoolSpec, check_pools

Bools = npt.NDArray[np.bool_]


@attrs.frozen(eq=False)
class Hits:
    """What a lookup found.

    Args:
        found: Pool name to the longest prefix that this pool alone allows.
        restorable: bool (n + 1,); entry p says whether a prefix of p pages
            can be restored. Entry 0 is true.
    """

    found: Mapping[str, int]
    restorable: Bools = attrs.field(repr=False)

    @property
    def best(self) -> int:
        """Pages of the longest prefix that can be restored."""
        return int(np.flatnonzero(self.restorable)[-1])

    @property
    def prefixes(self) -> tuple[int, ...]:
        """All restorable prefix lengths but 0, ascending."""
        return tuple(int(p) for p in np.flatnonzero(self.restorable) if p)


def allowed_prefixes(pool: PoolSpec, exists: Bools) -> Bools:
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
            np.logical_and.accumulate(exists, out=allowed[1:])
        case HitPolicy.TRAILING_PAGES:
            # A prefix of p needs [p - window, p): nothing missing since then.
            ends = np.arange(1, pages + 1)
            gone = np.maximum.accumulate(np.where(exists, 0, ends))
            allowed[1:] = gone <= np.maximum(ends - pool.window_pages, 0)
        case HitPolicy.BLOCK_GROUPS:
            group = pool.block_pages * pool.group_pages
            whole = pages // group
            groups = exists[: whole * group].reshape(whole, group).all(axis=1)
            run = int(np.logical_and.accumulate(groups).sum()) * group
            allowed[1:] = np.arange(1, pages + 1) <= run
    return allowed


def evaluate(
    pools: Sequence[PoolSpec], exists: Mapping[str, npt.ArrayLike], pages: int
) -> Hits:
    """Intersect what all required pools allow.

    Args:
        pools: All pools that have a route. Optional ones are reported and cut
            nothing. A logical anchor exists wherever nobody says otherwise.
        exists: Pool name to bool (pages,).
        pages: Length of the prefix that was asked for.

    Raises:
        PoolError: If a pool's answer is missing or has another length.
    """
    check_pools(pools)
    restorable = np.ones(pages + 1, np.bool_)
    found: dict[str, int] = {}
    for pool in pools:
        answer = exists.get(pool.name)
        if answer is None:
            if pool.physical:
                raise PoolError(f"nobody said which pages of {pool.name!r} exist")
            answer = np.ones(pages, np.bool_)
        there = cast("Bools", np.asarray(answer, np.bool_))
        if there.shape != (pages,):
            raise PoolError(
                f"pool {pool.name!r}: {there.shape} answers for {pages} pages"
            )
        allowed = allowed_prefixes(pool, there)
        found[pool.name] = int(np.flatnonzero(allowed)[-1])
        if pool.required:
            restorable &= allowed
    return Hits(found, restorable)
