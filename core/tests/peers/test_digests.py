"""Digests of pages: the same bytes in the same order on both sides."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvdock.geometry.matching import coalesce, match, move, packed
from kvdock.geometry.region import Region
from kvdock.peers import digests
from kvdock.peers.digests import PageDigests, landed_digests
from kvdock.pools.enums import DType, Layout, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from kvdock.geometry.grid import Grid


@attrs.frozen(eq=False)
class Side:
    """Memory of one process, and the grid of its pool."""

    memory: Any
    grid: Grid


def side(row_bytes: int, layout: Layout, page_tokens: int, pages: int) -> Side:
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=(Part("kv", DType.U8, (row_bytes,)),),
        layers=range(2),
        page_tokens=page_tokens,
        layout=layout,
        anchor=True,
    )
    memory = np.zeros(pool.page_bytes(Shard()) * pages, np.uint8)
    grid = Region.of(pool, Shard(), [memory], pages).grid
    assert grid is not None
    return Side(memory, grid)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Side, Side, Any, Any]:
    row_bytes = draw(st.sampled_from([3, 1152, 5000]))
    tokens = draw(st.sampled_from([1, 2, 4]))
    layouts = st.sampled_from(list(Layout))
    mine = side(row_bytes, draw(layouts), tokens, 6)
    theirs = side(row_bytes, draw(layouts), draw(st.sampled_from([1, 2, 4])), 24)
    count = draw(st.integers(1, 5 * tokens))
    room = 24 * theirs.grid.page_tokens
    slots = np.arange(count) + draw(st.integers(0, room - count))
    if draw(st.booleans()):
        slots = np.array(draw(st.permutations(range(room)))[:count])
    if draw(st.booleans()):
        slots[draw(st.integers(0, count - 1))] = -1
    pages = np.array(draw(st.permutations(range(6)))[: mine.grid.positions(count)])
    if draw(st.booleans()):
        pages.sort()
    return mine, theirs, pages, slots


def plainly(mine: Side, theirs: Side, pages: Any, slots: Any) -> list[int]:
    """Gather each page row by row into zeros, and hash it."""
    into = packed(mine.grid, theirs.grid, 0, len(pages))
    kept = np.where(slots >= 0, np.arange(len(slots)), -1)
    rows = match(mine.grid, into, pages, kept)
    area = bytearray(len(pages) * into.page_bytes)
    for a, b, size in zip(rows.local, rows.remote, rows.sizes, strict=True):
        area[b : b + size] = ctypes.string_at(int(a), int(size))
    step = into.page_bytes
    return [
        xxhash.xxh3_64_intdigest(bytes(area[at : at + step]))
        for at in range(0, len(area), step)
    ]


@given(
    requests(), st.sampled_from([1 << 20, 9000]), st.sampled_from([4096, 1]), st.data()
)
def test_both_sides_have_the_digests_of_a_plain_loop(
    case: tuple[Side, Side, Any, Any],
    gather_bytes: int,
    long_bytes: int,
    data: st.DataObject,
) -> None:
    mine, theirs, pages, slots = case
    mine.memory[:] = np.random.default_rng(1).integers(1, 256, mine.memory.size)
    rows = coalesce(match(mine.grid, theirs.grid, pages, slots))
    if len(rows):
        move(rows)
    wanted = plainly(*case)
    hasher = PageDigests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "_GATHER_BYTES", gather_bytes)
        patch.setattr(digests, "_LONG_PIECE_BYTES", long_bytes)
        for _ in range(2):  # the second time with memory that was kept
            found = hasher.sent(mine.grid, theirs.grid, pages, slots)
            assert found.tolist() == wanted
        arrived = hasher.arrived(mine.grid, theirs.grid, len(pages), slots)
        assert arrived.tolist() == wanted
        if not len(rows):
            return
        row = data.draw(st.integers(0, len(rows) - 1))
        byte = data.draw(st.integers(0, int(rows.sizes[row]) - 1))
        theirs.memory[rows.remote[row] + byte - theirs.memory.ctypes.data] ^= 1
        again = hasher.arrived(mine.grid, theirs.grid, len(pages), slots)
        assert np.count_nonzero(again != arrived) == 1


def test_pages_of_a_landing_area_have_their_digests() -> None:
    memory = np.arange(12, dtype=np.uint8)
    wanted = [
        xxhash.xxh3_64_intdigest(memory[at : at + 4].tobytes()) for at in (0, 4, 8)
    ]
    assert landed_digests(memory, 4).tolist() == wanted


def test_pages_without_common_bytes_have_no_digests() -> None:
    assert landed_digests(np.zeros(0, np.uint8), 0).tolist() == []
    one = side(8, Layout.LAYER_FIRST, 1, 4)
    none = np.zeros(0, np.int64)
    assert PageDigests().sent(one.grid, one.grid, none, none).tolist() == []
