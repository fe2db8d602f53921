"""The pools of an attachment as its calls need them, worked out once, at attach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.arrays import least_of, most_of
from kvdock.keys import check_hashes
from kvdock.transfer.page_indices import resolve_page_indices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvdock.arrays import Int64Array
    from kvdock.geometry.region import Region
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.channel import BackendChannel
    from kvdock.transfer.attached_pool import AttachedPool


@attrs.frozen(eq=False)
class CallPools:
    """What does not change from call to call.

    Args:
        attached: Pool name to the pool, anchor first.
        known: Names of all pools of the plan: pages of one that is not attached are
            ignored.
        specs: The attached pools' specs, in the same order.
        anchor_first: Names in the order in which pages are loaded.
        anchor_last: Names in the order in which they are stored.
        channel: That of all of them, where they have one backend; else None.
        engine_hits: Whether the engine evaluates hits itself.
        only: The name of the pool, where it is the only one; else "".
        plain: Name and pages of each pool, if all of them have bytes; else empty.
    """

    attached: Mapping[str, AttachedPool]
    known: frozenset[str]
    specs: tuple[PoolSpec, ...]
    anchor_first: tuple[str, ...]
    anchor_last: tuple[str, ...]
    channel: BackendChannel | None
    engine_hits: bool
    only: str
    _plain: tuple[tuple[str, int], ...]
    _memory: tuple[tuple[PoolSpec, Region], ...]

    @classmethod
    def of(
        cls, attached: Mapping[str, AttachedPool], known: frozenset[str]
    ) -> CallPools:
        """Work it out for pools that have just been attached."""
        pools = list(attached.values())
        specs = tuple(one.pool for one in pools)
        channels = {tier.channel for one in pools for tier in one.placements}
        by_anchor = sorted(specs, key=lambda pool: not pool.anchor)
        sidecars_first = sorted(specs, key=lambda pool: pool.anchor)
        return cls(
            attached=dict(attached),
            known=known,
            specs=specs,
            anchor_first=tuple(pool.name for pool in by_anchor),
            anchor_last=tuple(pool.name for pool in sidecars_first),
            channel=channels.pop() if len(channels) == 1 else None,
            engine_hits=any(pool.engine_hits for pool in specs[:1]),
            only=specs[0].name if len(specs) == 1 else "",
            plain=tuple((one.pool.name, one.region.pages) for one in pools)
            if all(one.region.physical for one in pools)
            else (),
            memory=tuple((one.pool, one.region) for one in pools),
        )

    def resolve(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> dict[str, Int64Array]:
        """Return each pool's page index for each position, checked.

        Raises:
            KvdockError: As `resolve_page_indices`.
        """
        check_hashes(hashes)
        rows = (len(hashes),)
        resolved: dict[str, Int64Array] = {}
        for name, limit in self._plain if len(hashes) else ():
            indices = pages.get(name)
            if (
                type(indices) is np.ndarray
                and indices.dtype == np.int64
                and indices.shape == rows
                and least_of(indices) >= 0
                and most_of(indices) < limit
            ):
                resolved[name] = indices
        if len(resolved) == len(pages) == len(self._memory):
            return resolved
        return resolve_page_indices(self._memory, self.known, hashes, pages)
