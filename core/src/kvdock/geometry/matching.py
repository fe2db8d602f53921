"""Rows of bytes that two pools share, and copying them.

The pools of two processes may differ in layout, page size and ranks. Their grids
match in rows: the same bytes on both sides. Everything here is arithmetic on
arrays; nothing but `move` touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np

from kvdock.errors import RegionError
from kvdock.geometry.region import array_at
from kvdock.pools.enums import Per

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock.geometry.grid import Grid, PartGrid

_FAR = 1 << 62
"""The stride of an axis that has only one step."""


@attrs.frozen(eq=False)
class Rows:
    """The same bytes on two sides.

    Args:
        local: int64 (n,), addresses on the side that is called mine.
        remote: int64 (n,), addresses on the other side.
        sizes: int64 (n,), bytes.
        count: Rows before any were joined: one a token, layer, part and so on.
    """

    local: Int64Array
    remote: Int64Array
    sizes: Int64Array
    count: int

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.sizes.sum())


def match(mine: Grid, theirs: Grid, pages: Int64Array, slots: Int64Array) -> Rows:
    """Return the rows that both grids hold of some tokens.

    Layers and heads that only one side holds are left out. Runs of tokens that
    are contiguous on both sides are one row.

    Args:
        mine: The side whose pages are given.
        theirs: The side whose slots are given.
        pages: int64, a page of mine for each `page_tokens` tokens; below 0 for
            none.
        slots: int64 (tokens,), where each token goes: page of theirs times its
            `page_tokens`, and the token in that page. Of pools whose parts are
            counted per page: int64 (pages,), the page of theirs for each of mine.
            Below 0 for a slot without bytes.

    Raises:
        RegionError: If the grids do not describe the same pool, or a page or a
            slot lies outside of them.
    """
    _check_comparable(mine, theirs)
    whole = _whole_pages(mine, theirs, pages, slots)
    tokens = mine.page_tokens if whole else 1
    a_page, a_entry, b_page, b_entry = whole or _places(mine, theirs, pages, slots)
    a_layers, b_layers = _common_layers(mine, theirs)
    pieces = []
    count = 0
    for a, b in zip(mine.parts, theirs.parts, strict=True):
        a_inner, b_inner, size = _inner(a, b)
        if not size or not len(a_page) or not len(a_layers):
            continue
        a_token = a_page * a.page_stride + a_entry * a.token_stride
        b_token = b_page * b.page_stride + b_entry * b.token_stride
        count += len(a_layers) * len(a_inner) * len(a_token) * tokens
        if whole:
            strides = (a.token_stride, b.token_stride)
            a_inner, b_inner, size = _repeated(a_inner, b_inner, size, strides, tokens)
        starts, lengths = _token_runs(a_token, b_token, size)
        shape = (len(a_layers), len(a_inner), len(starts))
        local = a.bases[a_layers][:, None, None] + a_inner[:, None] + a_token[starts]
        remote = b.bases[b_layers][:, None, None] + b_inner[:, None] + b_token[starts]
        sizes = np.broadcast_to(lengths, shape)
        pieces.append((local.ravel(), remote.ravel(), sizes.ravel()))
    if not pieces:
        none = np.zeros(0, np.int64)
        return Rows(none, none, none, 0)
    local, remote, sizes = (
        one[0] if len(one) == 1 else np.concatenate(one)
        for one in zip(*pieces, strict=True)
    )
    return Rows(local, remote, sizes, count)


def coalesce(rows: Rows) -> Rows:
    """Join rows that are neighbours on both sides."""
    if len(rows) < 2:  # noqa: PLR2004 - nothing to join
        return rows
    local, remote, sizes = rows.local, rows.remote, rows.sizes
    if np.count_nonzero(local[1:] < local[:-1]):
        order = np.argsort(local, kind="stable")
        local, remote, sizes = local[order], remote[order], sizes[order]
    ends = sizes[:-1]
    joins = (local[:-1] + ends == local[1:]) & (remote[:-1] + ends == remote[1:])
    if not np.count_nonzero(joins):
        return Rows(local, remote, sizes, rows.count)
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Rows(local[first], remote[first], np.add.reduceat(sizes, first), rows.count)


def packed(mine: Grid, theirs: Grid, address: int, pages: int) -> Grid:
    """Return the grid of what both hold of mine's pages, without gaps.

    The axes of a page are in mine's order, so that its runs stay long. The first page
    begins at `address`.

    Raises:
        RegionError: If the grids do not describe the same pool.
    """
    _check_comparable(mine, theirs)
    layers, _ = _common_layers(mine, theirs)
    parts = []
    start = 0
    for a, b in zip(mine.parts, theirs.parts, strict=True):
        low, high = max(a.heads[0], b.heads[0]), min(a.heads[1], b.heads[1])
        heads = max(0, high - low)
        step = int(a.bases[1] - a.bases[0]) if len(a.bases) > 1 else _FAR
        axes = {
            "layer": (abs(step), len(layers)),
            "token": (a.token_stride, mine.entries),
            "outer": (a.outer_stride, a.outer),
            "head": (a.head_stride, heads),
        }
        strides = {}
        nbytes = a.row_bytes
        for axis in sorted(axes, key=lambda one: axes[one][0]):
            strides[axis] = nbytes
            nbytes *= axes[axis][1]
        parts.append(
            attrs.evolve(
                a,
                heads=(low, low + heads),
                bases=address + start + np.arange(len(layers)) * strides["layer"],
                token_stride=strides["token"],
                outer_stride=strides["outer"],
                head_stride=strides["head"],
            )
        )
        start += nbytes
    return attrs.evolve(
        mine,
        pages=pages,
        layers=tuple(mine.layers[at] for at in layers.tolist()),
        parts=tuple(attrs.evolve(part, page_stride=start) for part in parts),
    )


def move(rows: Rows) -> None:
    """Copy rows from local to remote, both in this process's memory."""
    for size in np.unique(rows.sizes).tolist():
        chosen = rows.sizes == size
        source, target = rows.local[chosen], rows.remote[chosen]
        # Rows begin at any byte: the items of these arrays overlap.
        a, b = int(source.min()), int(target.min())
        into = _items(b, int(target.max()) - b + 1, size)
        into[target - b] = _items(a, int(source.max()) - a + 1, size)[source - a]


def _items(address: int, count: int, size: int) -> Any:  # noqa: ANN401 - of void items
    """Return items of some bytes, one beginning at every byte."""
    return array_at(address, (count,), (1,), f"|V{size}")


def held_slots(grid: Grid, slots: Int64Array) -> Int64Array:
    """Return slots with -1 for the tokens that lie on another rank."""
    if grid.per is Per.PAGE or grid.runs[1] == 1:
        return slots
    _, held = _entries(grid, slots % grid.page_tokens)
    return np.where(cast("BoolArray", held) & (slots >= 0), slots, -1)


def missing(mine: Grid, senders: Sequence[Grid]) -> str:
    """Return what no sender holds of the layers and heads of a grid, or "".

    Raises:
        RegionError: If a grid does not describe the same pool.
    """
    runs = {one.runs[1] for one in senders if one.runs[1] > 1}
    if len(runs) > 1:
        return f"tokens that senders divide in {sorted(runs)} ways"
    count = runs.pop() if runs else 1
    for index in range(count):
        own = [one for one in senders if one.runs[1] == 1 or one.runs[0] == index]
        for number, part in enumerate(mine.parts):
            first, last = part.heads
            found = np.zeros((len(mine.layers), last - first), np.bool_)
            for one in own:
                _check_comparable(mine, one)
                layers, _ = _common_layers(mine, one)
                low, high = one.parts[number].heads
                found[layers, max(0, low - first) : max(0, high - first)] = True
            if not found.all():
                layer, head = np.argwhere(~found)[0].tolist()
                return f"{part.name} of layer {mine.layers[layer]}, head {first + head}"
    return ""


def _check_comparable(mine: Grid, theirs: Grid) -> None:
    """Raise RegionError unless two grids describe slices of one pool."""
    shape = [(p.name, p.row_bytes, p.outer) for p in mine.parts]
    other = [(p.name, p.row_bytes, p.outer) for p in theirs.parts]
    if mine.pool != theirs.pool or mine.per is not theirs.per or shape != other:
        raise RegionError(
            f"pool {mine.pool!r} with parts {shape} does not match the peer's "
            f"{theirs.pool!r} with parts {other}",
            fix="Name, row bytes and outer rows of each part must be the same.",
        )
    if mine.rank != theirs.rank:
        raise RegionError(
            f"pool {mine.pool!r} has a state for each rank: that of rank "
            f"{mine.rank} does not match the peer's {theirs.rank}",
            fix="Use the same tensor-parallel size on both sides, or describe the "
            "state by heads.",
        )


def _places(
    mine: Grid, theirs: Grid, pages: Int64Array, slots: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return page and entry of each token on both sides, int64 (n,) each."""
    by_page = mine.per is Per.PAGE
    positions = len(slots) if by_page else mine.positions(len(slots))
    if len(pages) != positions:
        raise RegionError(
            f"pool {mine.pool!r}: {len(slots)} slots take {positions} pages of "
            f"{mine.page_tokens} tokens, not {len(pages)}"
        )
    last = theirs.pages * (1 if by_page else theirs.page_tokens)
    _check_inside(mine.pool, "page", pages, mine.pages)
    _check_inside(mine.pool, "slot of the peer", slots, last)
    if by_page:
        kept = (pages >= 0) & (slots >= 0)
        none = np.zeros(int(np.count_nonzero(kept)), np.int64)
        return pages[kept], none, slots[kept], none
    token = np.arange(len(slots), dtype=np.int64)
    at, offset = np.divmod(token, mine.page_tokens)
    a_page = pages[at]
    b_page, b_offset = np.divmod(slots, theirs.page_tokens)
    a_entry, a_held = _entries(mine, offset)
    b_entry, b_held = _entries(theirs, b_offset)
    kept = (a_page >= 0) & (slots >= 0)
    for held in (a_held, b_held):
        if held is not None:
            kept &= held
    if np.count_nonzero(kept) == len(kept):
        return a_page, a_entry, b_page, b_entry
    return a_page[kept], a_entry[kept], b_page[kept], b_entry[kept]


def _whole_pages(
    mine: Grid, theirs: Grid, pages: Int64Array, slots: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array] | None:
    """Return the same for the first token of each page, if all go as whole pages.

    A page is one step then instead of one for each token. None if they do not.
    """
    size = mine.page_tokens
    if (
        mine.per is Per.PAGE
        or size != theirs.page_tokens
        or mine.runs[1] != 1
        or theirs.runs[1] != 1
        or len(slots) != len(pages) * size
        or not len(slots)
    ):
        return None
    table = slots.reshape(-1, size)
    first = table[:, 0]
    aligned = (table == first[:, None] + np.arange(size)).all()
    if not aligned or (first % size).any() or first.min() < 0 or pages.min() < 0:
        return None
    _check_inside(mine.pool, "page", pages, mine.pages)
    _check_inside(mine.pool, "slot of the peer", slots, theirs.pages * size)
    none = np.zeros(len(pages), np.int64)
    return pages, none, first // size, none


def _repeated(
    a: Int64Array,
    b: Int64Array,
    size: int,
    strides: tuple[int, int],
    count: int,
) -> tuple[Int64Array, Int64Array, int]:
    """Return offsets and bytes of what is there several times, at equal steps.

    `a` and `b` are int64 (n,), offsets of `size` bytes on the two sides.
    """
    if len(a) == 1 and strides == (size, size):
        return a, b, size * count
    steps = np.arange(count, dtype=np.int64)[:, None]
    return (a + steps * strides[0]).ravel(), (b + steps * strides[1]).ravel(), size


def _check_inside(pool: str, what: str, numbers: Int64Array, count: int) -> None:
    if len(numbers) and numbers.max() >= count:
        raise RegionError(
            f"pool {pool!r}: {what} {numbers.max()} is outside of {count}"
        )


def _entries(grid: Grid, offset: Int64Array) -> tuple[Int64Array, BoolArray | None]:
    """Return which entries of a page tokens are, and which lie here."""
    index, count = grid.runs
    if count == 1:
        return offset, None
    run, within = np.divmod(offset, grid.interleave_tokens)
    held = cast("BoolArray", run % count == index)
    return run // count * grid.interleave_tokens + within, held


def _common_layers(mine: Grid, theirs: Grid) -> tuple[Int64Array, Int64Array]:
    """Return the indices of the layers that both hold, int64 (n,) each."""
    _, a, b = np.intersect1d(
        np.array(mine.layers, np.int64),
        np.array(theirs.layers, np.int64),
        assume_unique=True,
        return_indices=True,
    )
    return a, b


def _inner(a: PartGrid, b: PartGrid) -> tuple[Int64Array, Int64Array, int]:
    """Return the offsets in an entry of what both hold, and the bytes of each.

    Axes that are contiguous on both sides become longer rows.
    """
    low, high = max(a.heads[0], b.heads[0]), min(a.heads[1], b.heads[1])
    if low >= high:
        none = np.zeros(0, np.int64)
        return none, none, 0
    a_at = np.array([(low - a.heads[0]) * a.head_stride], np.int64)
    b_at = np.array([(low - b.heads[0]) * b.head_stride], np.int64)
    size = a.row_bytes
    axes = [
        (a.head_stride, b.head_stride, high - low),
        (a.outer_stride, b.outer_stride, a.outer),
    ]
    for a_stride, b_stride, count in sorted(axes):
        if count > 1 and a_stride == b_stride == size:
            size *= count
        elif count > 1:
            steps = np.arange(count, dtype=np.int64)[:, None]
            a_at = (a_at + steps * a_stride).ravel()
            b_at = (b_at + steps * b_stride).ravel()
    return a_at, b_at, size


def _token_runs(
    a: Int64Array, b: Int64Array, size: int
) -> tuple[Int64Array, Int64Array]:
    """Return where runs of tokens begin and their bytes, int64 (runs,) each."""
    cuts = (a[1:] - a[:-1] != size) | (b[1:] - b[:-1] != size)
    starts = np.concatenate(([0], np.flatnonzero(cuts) + 1))
    lengths = np.diff(starts, append=len(a)) * size
    return starts, lengths
