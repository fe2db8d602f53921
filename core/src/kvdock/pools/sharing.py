"""Changes of a deployment that find none of a pool's objects, and why.

Nothing is lost where pages are stored again; but after a change of the
number of ranks hits are expected, so the reason is reported before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.pools.enums import ObjectUnit, Sharding

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec


@attrs.frozen
class SharingLimit:
    """An axis along which a pool's objects are not shared.

    Args:
        axis: "tp" (another tensor-parallel size), "pp" (another number of
            pipeline stages) or "draft" (another draft model, or none).
    """

    pool: str
    axis: str
    reason: str

    def __str__(self) -> str:
        """Render as one line."""
        return f"pool {self.pool} is not shared along {self.axis}: {self.reason}"


def sharing_limits(
    pool: PoolSpec,
    *,
    stages: int = 1,
    tp_size: int = 1,
    share_tp: Sequence[int] = (),
    packed_layers: int = 0,
) -> tuple[SharingLimit, ...]:
    """Return the axes along which a pool's objects cannot be shared.

    `share_tp` are other TP sizes that are to find the objects; none asked for is none
    missed. `packed_layers` are those of a draft model behind the target's.
    """
    if not pool.physical:
        return ()
    found: list[SharingLimit] = []
    sizes = ", ".join(map(str, share_tp))
    if share_tp and pool.sharding is Sharding.RANK:
        why = (
            "every rank keeps a state of its own, and no number of heads is known "
            f"that divides all of its parts among {sizes} ranks as well"
        )
        found.append(SharingLimit(pool.name, "tp", why))
    elif share_tp and _heads_of_object(pool, tp_size) > max(
        1, pool.heads // math.lcm(tp_size, *share_tp)
    ):
        why = f"an object holds more heads than one of {sizes} ranks does"
        found.append(SharingLimit(pool.name, "tp", why))
    if stages > 1 and pool.object_unit is not ObjectUnit.LAYER:
        why = "an object holds the layers of one pipeline stage"
        found.append(SharingLimit(pool.name, "pp", why))
    if packed_layers:
        why = f"the last {packed_layers} layers of each page are those of a draft model"
        found.append(SharingLimit(pool.name, "draft", why))
    return tuple(found)


def _heads_of_object(pool: PoolSpec, tp_size: int) -> int:
    if not pool.by_head:
        return 0
    return pool.head_group or max(1, pool.heads // tp_size)
