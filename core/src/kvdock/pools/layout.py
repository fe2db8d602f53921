"""Cut one page of a pool into stored objects and runs of bytes.

Routing asks before there is any memory, so nothing here imports numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.pools.enums import Layout, ObjectUnit, Sharding
from kvdock.pools.objects import LAYOUT_AXES, Coordinate, Span, StoredObject

if TYPE_CHECKING:
    from kvdock.pools.part import Part
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


def stored_objects(pool: PoolSpec, shard: Shard) -> tuple[StoredObject, ...]:
    """Return what one page of a shard is stored as, in key order.

    Order: head group, then part, then layer. A logical anchor is one object
    without bytes, so that its presence can still be stored. A pool that has
    no layer in the shard's stage is not an object at all.
    """
    layers = pool.local_layers(shard)
    if not pool.physical:
        # Each stage marks its own part of the prefix: one writer for each.
        mark = Coordinate(pool.name, layers=shard.layers, mark=True)
        return (StoredObject(str(mark), (), layers, None, 0),)
    if not layers:
        return ()
    picks: list[tuple[tuple[Part, ...], tuple[int, ...]]] = [(pool.parts, layers)]
    if pool.object_unit is not ObjectUnit.PAGE:
        # A part may be empty; stores refuse objects without bytes.
        picks = [((part,), layers) for part in pool.parts if part.entry_bytes]
    if pool.object_unit is ObjectUnit.LAYER:
        picks = [(parts, (layer,)) for parts, _ in picks for layer in layers]
    return tuple(
        _object(pool, shard, heads, parts, some)
        for heads in pool.head_groups(shard)
        for parts, some in picks
    )


def _object(
    pool: PoolSpec,
    shard: Shard,
    heads: Span,
    parts: tuple[Part, ...],
    layers: tuple[int, ...],
) -> StoredObject:
    tokens = pool.token_runs(shard)
    coordinate = Coordinate(
        pool.name,
        layers=(layers[0], layers[-1] + 1),
        heads=heads if pool.by_head else None,
        rank=(shard.tp_rank, shard.tp_size) if pool.sharding is Sharding.RANK else None,
        tokens=tokens if tokens[1] > 1 else None,
        part="" if pool.object_unit is ObjectUnit.PAGE else parts[0].name,
    )
    nbytes = len(layers) * sum(
        pool.entries(part, shard)
        * part.outer
        * (heads[1] - heads[0] if pool.by_head else pool.local_units(part, shard))
        * part.row_bytes
        for part in parts
    )
    return StoredObject(
        str(coordinate),
        tuple(part.name for part in parts),
        layers,
        coordinate.heads,
        nbytes,
    )


def count_buffers(pool: PoolSpec, shard: Shard) -> int:
    """Return how many runs of bytes the largest object of a page has.

    The same number that a region of more than one page finds, without any
    memory: routing asks it before there is some.
    """
    objects = stored_objects(pool, shard)
    if pool.pieces > 1:
        # Rows with gaps: no smaller unit is known to be in one piece.
        return pool.pieces
    return max((_buffers(pool, shard, stored) for stored in objects), default=0)


def _buffers(pool: PoolSpec, shard: Shard, stored: StoredObject) -> int:
    parts = [p for p in pool.parts if p.name in stored.parts and p.entry_bytes]
    runs = [_runs(pool, shard, part, stored) for part in parts]
    whole = stored.layers == pool.local_layers(shard) and (
        stored.heads in (None, pool.local_heads(shard))
    )
    if pool.layout is Layout.PAGE_OBJECT and whole:
        # The parts of a page lie side by side and make one run.
        return min(1, len(runs))
    return sum(runs)


def slice_axes(
    pool: PoolSpec, shard: Shard, part: Part, stored: StoredObject
) -> dict[str, tuple[int, int, int]]:
    """Return which slice of a part's array one page of an object is.

    Returns:
        Axis to (extent, first, past the last); of axis "page" only the slice
        (0, 1) is known, its extent is that of the pool's memory.
    """
    mine = pool.local_layers(shard)
    first = mine.index(stored.layers[0])
    units = pool.local_units(part, shard)
    low, high = 0, units
    if stored.heads is not None:
        start, _ = pool.local_heads(shard)
        low, high = stored.heads[0] - start, stored.heads[1] - start
    entries = pool.entries(part, shard)
    return {
        "page": (0, 0, 1),
        "layer": (len(mine), first, first + len(stored.layers)),
        "token": (entries, 0, entries),
        "outer": (part.outer, 0, part.outer),
        "head": (units, low, high),
    }


def _runs(pool: PoolSpec, shard: Shard, part: Part, stored: StoredObject) -> int:
    axes = slice_axes(pool, shard, part, stored)
    runs, whole = 1, True
    for axis in reversed(LAYOUT_AXES[pool.layout]):
        extent, first, last = axes[axis]
        if whole:
            # A pool of one page is the exception that nothing is planned for.
            whole = axis != "page" and last - first == extent
        else:
            runs *= last - first
    return runs
