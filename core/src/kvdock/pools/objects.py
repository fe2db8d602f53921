"""Objects: what one page of one shard is stored as, and how it is named.

A coordinate says what an object holds and never who wrote it, so ranks of
different deployments share an object whenever they hold the same slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import PoolError
from kvdock.pools.enums import (Layout, ObjectUnit, Sharding)

if TYPE_CHECKING:
    from kvdock.pools.spec import (Part, PoolSpec)
    from kvdock.pools.shard import Shard

Span = tuple[int, int]
"""Half-open range: first, past the last."""

LAYOUT_AXES: Mapping[Layout, tuple[str, ...]] = MappingProxyType(
    {
        Layout.LAYER_FIRST: ("layer", "page", "token", "outer", "head"),
        Layout.PAGE_FIRST: ("page", "token", "layer", "outer", "head"),
        Layout.PAGE_FIRST_DIRECT: ("page", "layer", "token", "outer", "head"),
        Layout.PAGE_HEAD: ("page", "head", "token", "layer", "outer"),
        Layout.PAGE_OBJECT: ("page", "layer", "token", "outer", "head"),
    }
)
"""Axes of one part in memory, from the outermost inwards."""

_COORDINATE = re.compile(
    r"(?P<pool>[a-z][a-z0-9_]*)(?P<mark>\.mark)?"
    r"(?:\.L(?P<layers>\d+-\d+))?(?:\.H(?P<heads>\d+-\d+))?"
    r"(?:\.R(?P<rank>\d+of\d+))?(?:\.D(?P<tokens>\d+of\d+))?"
    r"(?:\.(?P<part>[a-z][a-z0-9_]*))?"
)


@attrs.frozen
class Coordinate:
    """What an object holds of its page, as text and back.

    Args:
        pool: The pool's name.
        layers: Span of global layer numbers; of a pool that skips layers,
            those in between that it has.
        heads: Span of heads, or None where heads are not divided.
        rank: (index, count) of a state that every TP rank has of its own.
        tokens: (index, count) of the runs of tokens that it holds, or None.
        part: The one part that it holds, or "" for all.
        mark: Whether it only says that the page is there.
    """

    pool: str
    layers: Span | None = None
    heads: Span | None = None
    rank: Span | None = None
    tokens: Span | None = None
    part: str = ""
    mark: bool = False

    def __str__(self) -> str:
        """Spell it: pool, layers, heads, rank, tokens, part."""
        words = [self.pool]
        if self.mark:
            words.append("mark")
        if self.layers:
            words.append(f"L{self.layers[0]}-{self.layers[1]}")
        if self.heads:
            words.append(f"H{self.heads[0]}-{self.heads[1]}")
        if self.rank:
            words.append(f"R{self.rank[0]}of{self.rank[1]}")
        if self.tokens:
            words.append(f"D{self.tokens[0]}of{self.tokens[1]}")
        if self.part:
            words.append(self.part)
        return ".".join(words)

    @classmethod
    def parse(cls, text: str) -> Coordinate:
        """Read a coordinate back.

        Raises:
            PoolError: If it is not the spelling of one.
        """
        match = _COORDINATE.fullmatch(text)
        if match is None:
            raise PoolError(f"{text!r} is not an object's coordinate")
        found = match.groupdict()
        return cls(
            pool=found["pool"],
            layers=_span(found["layers"], "-"),
            heads=_span(found["heads"], "-"),
            rank=_span(found["rank"], "of"),
            tokens=_span(found["tokens"], "of"),
            part=found["part"] or "",
            mark=found["mark"] is not None,
        )


def _span(text: str | None, between: str) -> Span | None:
    if text is None:
        return None
    first, last = text.split(between)
    return int(first), int(last)


@attrs.frozen
class StoredObject:
    """What a backend keeps under one key: some parts of one page.

    `coordinate` spells what it holds, unique in its pool on every rank.
    """

    coordinate: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    heads: Span | None
    nbytes: int


def objects_of(pool: PoolSpec, shard: Shard) -> tuple[StoredObject, ...]:
    """Return what one page of a shard is stored as, in key order.

    Order: head group, then part, then layer. A logical anchor is one object
    without bytes, so that its presence can still be stored. A pool that has
    no layer in the shard's stage is no object at all.
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


def segments_of(pool: PoolSpec, shard: Shard) -> int:
    """Return how many runs of bytes the largest object of a page has.

    The same number that a region of more than one page finds, without any
    memory: routing asks it before there is some.
    """
    objects = objects_of(pool, shard)
    return max((_segments(pool, shard, stored) for stored in objects), default=0)


def _segments(pool: PoolSpec, shard: Shard, stored: StoredObject) -> int:
    parts = [p for p in pool.parts if p.name in stored.parts and p.entry_bytes]
    runs = [_runs(pool, shard, part, stored) for part in parts]
    whole = stored.layers == pool.local_layers(shard) and (
        stored.heads in (None, pool.local_heads(shard))
    )
    if pool.layout is Layout.PAGE_OBJECT and whole:
        # The parts of a page lie side by side and make one run.
        return min(1, len(runs))
    return sum(runs)


def _runs(pool: PoolSpec, shard: Shard, part: Part, stored: StoredObject) -> int:
    units = pool.local_units(part, shard)
    held = units if stored.heads is None else stored.heads[1] - stored.heads[0]
    layers = len(pool.local_layers(shard))
    # (extent, how much of it the object takes)
    axes = {
        "page": (math.inf, 1),
        "layer": (layers, len(stored.layers)),
        "token": (pool.entries(part, shard),) * 2,
        "outer": (part.outer,) * 2,
        "head": (units, held),
    }
    runs, whole = 1, True
    for axis in reversed(LAYOUT_AXES[pool.layout]):
        extent, taken = axes[axis]
        if whole:
            whole = extent == taken
        else:
            runs *= taken
    return runs
