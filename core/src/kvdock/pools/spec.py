"""Pools as data: what one page of one kind of cached state is made of.

A pool description is global: all layers and all heads of the model, the same
on every rank. A `Shard` says which slice of it a process owns. That split is
what lets a key name what an object holds and never who wrote it.

Nothing here does I/O, imports numpy, or knows a model or a backend by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import PoolError, did_you_mean
from kvdock.pools.enums import (
    ContextSplit,
    HitPolicy,
    Layout,
    ObjectUnit,
    Per,
    PoolKind,
    Sharding,
)
from kvdock.pools.shard import Shard, even_shares
from kvdock.pools.validators import (
    boolean,
    identifier,
    int_tuple,
    integer,
    non_negative,
    positive,
)
from kvdock.validators import as_int, as_int_tuple, as_text

if TYPE_CHECKING:
    from kvdock.pools.part import Part


def _ascending(_: object, field: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
    int_tuple(_, field, value)
    if list(value) != sorted(set(value)) or any(layer < 0 for layer in value):
        raise PoolError(f"layers {value} are not ascending global layer numbers")


def _parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(parts)


@attrs.frozen(kw_only=True)
class PoolSpec:
    """One kind of cached state, as pages of equal size.

    Args:
        name: The pool's name; no rule hangs on it.
        kind: What the bytes mean.
        parts: Components in the order in which they are stored.
        layers: Global numbers of the layers that have this pool.
        page_tokens: Tokens that one page covers, over all ranks.
        anchor: Whether this pool's pages define the prefix.
        draft: Whether it belongs to a draft model.
        required: Restoring without a required pool is wrong, without an
            optional one only slower.
        indices_from: The pool whose page indices it shares, or None.
        hit_policy: Which of its pages a prefix needs.
        window_pages: The window of TRAILING_PAGES.
        block_pages: Pages of one block of BLOCK_GROUPS.
        group_pages: Pages of one group of BLOCK_GROUPS.
        sharding: How tensor-parallel ranks divide a page.
        context: How context-parallel ranks divide it further.
        interleave_tokens: Consecutive tokens of a page that one rank takes,
            where tokens are divided.
        layout: How pages lie in host memory.
        pieces: Runs of bytes that a page of PAGE_OBJECT has there; more than one
            where it is a part of a row (see `RowLayout`).
        head_group: Heads per stored object; 0 keeps a rank's heads together.
            A common divisor of several TP sizes lets them share objects.
        engine_hits: Whether the engine asks about its pages one by one and
            evaluates hits itself, so that there is no anchor.
        object_unit: How much goes under one key; the router sets it.
    """

    name: str = attrs.field(converter=as_text, validator=identifier)
    kind: PoolKind = attrs.field(converter=PoolKind)
    parts: tuple[Part, ...] = attrs.field(converter=_parts)
    layers: tuple[int, ...] = attrs.field(converter=as_int_tuple, validator=_ascending)
    page_tokens: int = attrs.field(converter=as_int, validator=positive)
    anchor: bool = attrs.field(default=False, validator=boolean)
    draft: bool = attrs.field(default=False, validator=boolean)
    required: bool = attrs.field(default=True, validator=boolean)
    indices_from: str | None = None
    hit_policy: HitPolicy = attrs.field(
        default=HitPolicy.ALL_PAGES, converter=HitPolicy
    )
    window_pages: int = attrs.field(default=0, converter=as_int, validator=non_negative)
    block_pages: int = attrs.field(default=0, converter=as_int, validator=non_negative)
    group_pages: int = attrs.field(default=0, converter=as_int, validator=non_negative)
    sharding: Sharding = attrs.field(converter=Sharding)
    context: ContextSplit = attrs.field(
        default=ContextSplit.REPLICATED, converter=ContextSplit
    )
    interleave_tokens: int = attrs.field(
        default=1, converter=as_int, validator=positive
    )
    layout: Layout = attrs.field(default=Layout.PAGE_OBJECT, converter=Layout)
    pieces: int = attrs.field(default=1, converter=as_int, validator=positive)
    head_group: int = attrs.field(default=0, converter=as_int, validator=integer)
    engine_hits: bool = attrs.field(default=False, validator=boolean)
    object_unit: ObjectUnit = attrs.field(default=ObjectUnit.PAGE, converter=ObjectUnit)

    @sharding.default
    def _by_parts(self) -> Sharding:
        divided = any(part.shard_axis is not None for part in self.parts)
        return Sharding.HEADS if divided else Sharding.REPLICATED

    def __attrs_post_init__(self) -> None:
        """Refuse a description that contradicts itself."""
        where = f"pool {self.name!r}"
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise PoolError(f"{where} names a part twice: {names}")
        logical = self.kind is PoolKind.LOGICAL
        if logical != (not self.parts):
            raise PoolError(
                f"{where} of kind {self.kind} has {len(self.parts)} parts",
                fix="A logical anchor has no parts; every other pool has some.",
            )
        if not logical and not self.layers:
            raise PoolError(f"{where} has no layers")
        if self.anchor and self.hit_policy is not HitPolicy.ALL_PAGES:
            raise PoolError(f"{where} is the anchor, so every page of it must be there")
        if self.anchor and (self.indices_from or not self.required):
            raise PoolError(f"{where} is the anchor: required, with its own indices")
        if self.engine_hits and (
            self.anchor or self.hit_policy is not HitPolicy.ALL_PAGES
        ):
            raise PoolError(
                f"{where} has hits that the engine evaluates, so it is not an anchor "
                "and has no hit policy"
            )
        if self.pieces > 1 and self.layout is not Layout.PAGE_OBJECT:
            raise PoolError(f"{where} has pages in pieces, but layout {self.layout}")
        self._check_policy(where)
        self._check_sharding(where)

    def _check_policy(self, where: str) -> None:
        if (self.hit_policy is HitPolicy.TRAILING_PAGES) != (self.window_pages > 0):
            raise PoolError(
                f"{where}: hit policy {self.hit_policy} with "
                f"window_pages={self.window_pages}",
                fix="TRAILING_PAGES needs a window of at least one page, "
                "the others none.",
            )
        grouped = self.hit_policy is HitPolicy.BLOCK_GROUPS
        geometry = 0 < self.group_pages <= self.block_pages
        if grouped != geometry or (not grouped and self.block_pages):
            raise PoolError(
                f"{where}: hit policy {self.hit_policy} with "
                f"block_pages={self.block_pages}, group_pages={self.group_pages}",
                fix="BLOCK_GROUPS needs a block of pages and a group of at most as "
                "many, the other policies none.",
            )
        if grouped and self.required:
            raise PoolError(
                f"{where} is required, but its block groups never cut a prefix",
                fix="Set required=False: it is a second form of other pages.",
            )

    def _check_sharding(self, where: str) -> None:
        axes = {part.shard_axis is not None for part in self.parts}
        counts = {part.units for part in self.parts if part.shard_axis is not None}
        if self.physical and not any(part.entry_bytes for part in self.parts):
            raise PoolError(f"{where} has no bytes in any of its parts")
        if not self.physical and (
            self.sharding is not Sharding.REPLICATED
            or self.context is not ContextSplit.REPLICATED
        ):
            raise PoolError(f"{where} has no bytes that ranks could divide")
        if self.sharding is Sharding.RANK and True not in axes:
            raise PoolError(f"{where} is divided by {self.sharding}, but no part is")
        if self.sharding is Sharding.REPLICATED and True in axes:
            raise PoolError(f"{where} is replicated, but a part has a shard_axis")
        if (self.sharding is Sharding.HEADS and False in axes) or (
            self.sharding is Sharding.DCP and len(axes) > 1
        ):
            raise PoolError(
                f"{where} is divided by heads, but not every part is",
                fix="Give every part a shard_axis, or describe the others as a pool.",
            )
        if self.by_head and (len(counts) > 1 or 0 in counts):
            raise PoolError(f"{where}: parts have different head counts {counts}")
        if self.head_group and not self.by_head:
            raise PoolError(f"{where}: head_group needs a pool divided by heads")
        if self.head_group < 0 or (self.head_group and self.heads % self.head_group):
            raise PoolError(
                f"{where}: head_group {self.head_group} does not divide "
                f"{self.heads} heads"
            )
        self._check_tokens(where)

    def _check_tokens(self, where: str) -> None:
        divided = self.sharding is Sharding.DCP or self.context is ContextSplit.TOKENS
        if self.interleave_tokens > 1 and not divided:
            raise PoolError(f"{where} has interleaved tokens, but divides none")
        if divided and any(part.per is Per.PAGE for part in self.parts):
            raise PoolError(
                f"{where} is divided by token, but a part is counted per page",
                fix="Describe parts per page as a pool of their own.",
            )

    @property
    def heads(self) -> int:
        """Heads of the whole model that this pool divides among ranks, or 1."""
        if not self.by_head:
            return 1
        divided = [p.units for p in self.parts if p.shard_axis is not None]
        return divided[0]

    @property
    def by_head(self) -> bool:
        """Return whether ranks hold heads, so that coordinates name them."""
        if self.sharding is Sharding.DCP:
            return any(part.shard_axis is not None for part in self.parts)
        return self.sharding is Sharding.HEADS

    @property
    def physical(self) -> bool:
        """Return whether the pool has bytes at all."""
        return self.kind is not PoolKind.LOGICAL

    def local_layers(self, shard: Shard) -> tuple[int, ...]:
        """Return the layers of this pool that the shard holds."""
        layers = self.layers
        if shard.layers is not None:
            start, stop = shard.layers
            layers = tuple(layer for layer in layers if start <= layer < stop)
        if self.context is ContextSplit.LAYERS:
            shares = even_shares(len(layers), shard.cp_size)
            first = sum(shares[: shard.cp_rank])
            layers = layers[first : first + shares[shard.cp_rank]]
        return layers

    def local_heads(self, shard: Shard) -> tuple[int, int]:
        """Return the half-open head range that the shard holds.

        With more ranks than heads, neighbouring ranks hold the same head.

        Raises:
            PoolError: If heads and ranks do not divide each other.
        """
        if not self.by_head:
            return 0, self.heads
        heads, ranks = self.heads, shard.tp_size
        if heads % ranks == 0:
            each = heads // ranks
            return shard.tp_rank * each, (shard.tp_rank + 1) * each
        if ranks % heads == 0:
            head = shard.tp_rank // (ranks // heads)
            return head, head + 1
        raise PoolError(
            f"pool {self.name!r}: {heads} heads cannot be divided "
            f"among {ranks} tensor-parallel ranks"
        )

    def local_units(self, part: Part, shard: Shard) -> int:
        """Return how much of a part's divided axis the shard holds.

        Raises:
            PoolError: If a per-rank state does not divide evenly.
        """
        if part.shard_axis is None:
            return 1
        if self.by_head:
            start, stop = self.local_heads(shard)
            return stop - start
        if part.units % shard.tp_size:
            raise PoolError(
                f"pool {self.name!r}: part {part.name!r} has {part.units} rows for "
                f"{shard.tp_size} tensor-parallel ranks"
            )
        return part.units // shard.tp_size

    def token_runs(self, shard: Shard) -> tuple[int, int]:
        """Return (index, count): which of the interleaved tokens it holds.

        Token t of a page belongs to index `t // interleave_tokens % count`.

        Raises:
            PoolError: If a page does not divide among those ranks.
        """
        dcp = shard.dcp_size if self.sharding is Sharding.DCP else 1
        cp = shard.cp_size if self.context is ContextSplit.TOKENS else 1
        count = dcp * cp
        if count > 1 and self.page_tokens % (count * self.interleave_tokens):
            raise PoolError(
                f"pool {self.name!r}: a page of {self.page_tokens} tokens cannot be "
                f"divided among {count} ranks in runs of {self.interleave_tokens}"
            )
        index = shard.dcp_rank if dcp > 1 else 0
        return (shard.cp_rank * dcp + index if cp > 1 else index), count

    def local_tokens(self, shard: Shard) -> int:
        """Return how many tokens of a page the shard holds."""
        return self.page_tokens // self.token_runs(shard)[1]

    def entries(self, part: Part, shard: Shard) -> int:
        """Return how many entries a part has in one page and layer."""
        return self.local_tokens(shard) if part.per is Per.TOKEN else 1

    def part_bytes(self, part: Part, shard: Shard) -> int:
        """Return the bytes of a part in one page and layer of the shard."""
        units = self.local_units(part, shard)
        return self.entries(part, shard) * part.outer * units * part.row_bytes

    def page_bytes(self, shard: Shard) -> int:
        """Return the bytes of one page that the shard holds."""
        layers = len(self.local_layers(shard))
        return layers * sum(self.part_bytes(part, shard) for part in self.parts)

    def head_groups(self, shard: Shard) -> tuple[tuple[int, int], ...]:
        """Return the head ranges that the shard's objects hold.

        Raises:
            PoolError: If the head group does not divide the shard's heads.
        """
        start, stop = self.local_heads(shard)
        group = self.head_group or stop - start
        if (stop - start) % group:
            raise PoolError(
                f"pool {self.name!r}: head_group {group} does not divide the "
                f"{stop - start} heads of a rank",
                fix=f"Use a divisor of {stop - start}, or 0 to keep them together.",
            )
        return tuple((head, head + group) for head in range(start, stop, group))

    def writes(self, shard: Shard) -> bool:
        """Return whether this rank is the one that stores its objects.

        Every object has exactly one writer: the first of the ranks that hold
        the same bytes. Where whole pages are spread over context-parallel
        ranks, each writes the pages that it was given.

        Raises:
            PoolError: If DCP ranks hold different heads of the pool.
        """
        if self.context is ContextSplit.REPLICATED and shard.cp_rank:
            return False
        if self.sharding is Sharding.RANK:
            return True
        start, stop = self.local_heads(shard)
        held = self.heads // (stop - start) if self.by_head else 1
        copies = shard.tp_size // held
        place = shard.tp_rank % copies
        if self.sharding is not Sharding.DCP:
            return place == 0
        if copies % shard.dcp_size:
            raise PoolError(
                f"pool {self.name!r}: {shard.dcp_size} DCP ranks cannot share the "
                f"{copies} copies of a head that {shard.tp_size} TP ranks hold",
                fix="Use a DCP size that divides the number of copies.",
            )
        return place == shard.dcp_rank


def check_pools(pools: Sequence[PoolSpec]) -> None:
    """Check that pools belong together.

    Raises:
        PoolError: On no or two anchors, a name twice, or a pool that shares
            indices which cannot be its own.
    """
    named = {pool.name: pool for pool in pools}
    if len(named) < len(pools):
        names = [pool.name for pool in pools]
        twice = next(name for name in names if names.count(name) > 1)
        raise PoolError(f"pool {twice!r} is described twice")
    by_engine = [pool.name for pool in pools if pool.engine_hits]
    if not by_engine:
        _check_anchor(pools)
    elif len(by_engine) < len(pools):
        raise PoolError(
            f"the engine evaluates the hits of {', '.join(by_engine)}, and not of "
            f"{', '.join(name for name in named if name not in by_engine)}",
            fix="Set engine_hits=True on all pools of an engine, or on none.",
        )
    for pool in pools:
        if pool.indices_from is not None:
            _check_source(pool, named)


def _check_anchor(pools: Sequence[PoolSpec]) -> None:
    """Raise unless there is one anchor, and pages are as long as its own."""
    anchors = [pool for pool in pools if pool.anchor]
    if len(anchors) != 1:
        raise PoolError(
            f"there must be one anchor, not {len(anchors)}: "
            f"{[pool.name for pool in anchors]}",
            fix="Set anchor=True on the pool whose pages define the prefix, or "
            "engine_hits=True on all pools.",
        )
    for pool in pools:
        if pool.page_tokens != anchors[0].page_tokens:
            raise PoolError(
                f"pool {pool.name!r} has pages of {pool.page_tokens} tokens, "
                f"the anchor {anchors[0].name!r} of {anchors[0].page_tokens}"
            )


def _check_source(pool: PoolSpec, named: Mapping[str, PoolSpec]) -> None:
    source = named.get(str(pool.indices_from))
    shares = f"pool {pool.name!r} shares the indices of {pool.indices_from!r}"
    if source is None:
        raise PoolError(
            f"{shares}, which is not there",
            fix=did_you_mean(str(pool.indices_from), named),
        )
    if source.indices_from is not None:
        raise PoolError(
            f"{shares}, which has none of its own",
            fix=f"Name their root: indices_from={source.indices_from!r}.",
        )
    # A trailing pool has pages in its window alone: no pool can share others.
    if source.window_pages and not 0 < pool.window_pages <= source.window_pages:
        raise PoolError(
            f"{shares}, which keeps a window of {source.window_pages} pages, "
            f"but needs {pool.window_pages or 'all'} of them",
            fix="Give it TRAILING_PAGES with the source's window, or own indices.",
        )
