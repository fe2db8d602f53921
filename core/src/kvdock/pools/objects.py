"""Objects: what one page of one shard is stored as, and how it is named.

A coordinate says what an object holds and never who wrote it, so ranks of
different deployments share an object whenever they hold the same slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from kvdock.errors import PoolError
from kvdock.pools.enums import Layout

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


TRAILER_BYTES = 40
"""What the core adds to an object whose backend does not verify it."""


@attrs.frozen
class Coordinate:
    """The coordinate of an object in its page, as text and back.

    Args:
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
        """Read a coordinate back."""
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

    def overlaps(self, other: Coordinate) -> bool:
        """Return whether both hold a part of the same bytes."""
        return all(
            mine[0] < theirs[1] and theirs[0] < mine[1]
            for mine, theirs in zip(self._ranges(), other._ranges(), strict=True)
        )

    def _ranges(self) -> list[tuple[float, float]]:
        """Return the half-open range on each axis; shares of ranks as fractions."""
        spans = [one or (0, math.inf) for one in (self.layers, self.heads)]
        shares = [one or (0, 1) for one in (self.rank, self.tokens)]
        return [*spans, *((at / of, (at + 1) / of) for at, of in shares)]


def _span(text: str | None, between: str) -> Span | None:
    if text is None:
        return None
    first, last = text.split(between)
    return int(first), int(last)


@attrs.frozen
class StoredObject:
    """The content of one key: some parts of one page.

    `coordinate` spells what it holds, unique in its pool on every rank.
    """

    coordinate: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    heads: Span | None
    nbytes: int


def slice_name(objects: Sequence[StoredObject]) -> str:
    """Return the coordinate of all that a shard has of a page, in one object."""
    every = [Coordinate.parse(one.coordinate) for one in objects]
    if not every:
        return ""
    layers = [span for one in every if (span := one.layers)]
    heads = [span for one in every if (span := one.heads)]
    whole = attrs.evolve(
        every[0], layers=_around(layers), heads=_around(heads), part=""
    )
    return str(whole)


def _around(spans: Sequence[Span]) -> Span | None:
    if not spans:
        return None
    return min(first for first, _ in spans), max(last for _, last in spans)
