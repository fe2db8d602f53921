"""Translate the engine's question about a prefix into the core's terms.

The engine names a pool's hit policy and window with each request. The rule
that turns existing pages into restorable prefixes is the core's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock import HitPolicy, Hits, evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock import PoolSpec
    from kvdock.arrays import BoolArray


@attrs.frozen(eq=False)
class PoolQuery:
    """One pool of a query.

    Args:
        spec: The pool, with the policy of this request.
        there: bool (n,), which of its pages exist.
    """

    spec: PoolSpec
    there: BoolArray

    @classmethod
    def of(
        cls,
        spec: PoolSpec,
        there: BoolArray,
        *,
        policy: str,
        window: int = 0,
        block_pages: int = 0,
        group_pages: int = 0,
    ) -> PoolQuery:
        """Give a sidecar the policy and window that the request names.

        Whole groups of blocks are a second form of pages that are there
        anyway, so the engine wants their count and no cut.
        """
        found = HitPolicy(policy)
        trailing = found is HitPolicy.TRAILING_PAGES
        groups = found is HitPolicy.BLOCK_GROUPS
        return cls(
            attrs.evolve(
                spec,
                anchor=False,
                required=not groups,
                indices_from=None,
                hit_policy=found,
                window_pages=max(1, window) if trailing else 0,
                block_pages=block_pages if groups else 0,
                group_pages=group_pages if groups else 0,
            ),
            there,
        )


def evaluate_query(asked: Sequence[PoolQuery], pages: int) -> Hits:
    """Return which prefixes all queried pools allow; the first is the anchor."""
    there = {one.spec.name: one.there for one in asked}
    return evaluate([one.spec for one in asked], there, pages)
