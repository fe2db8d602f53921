from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import RegionError
from kvdock.geometry import matching
from kvdock.geometry.matching import Rows, coalesce, match, move, packed
from kvdock.geometry.region import Region
from kvdock.peers.messages import Epoch, MessageError, Offer
from kvdock.pools.enums import DType, Layout, Per, PoolKind, Sharding
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from kvdock.geometry.grid import Grid

HEADS = 4
LAYERS = (0, 2, 7)


@attrs.frozen
class Side:
    """One process's pool: its grid, and its memory as bytes."""

    pool: PoolSpec
    shard: Shard
    region: Region
    memory: npt.NDArray[np.uint8]

    @property
    def grid(self) -> Grid:
        assert self.region.grid is not None
        return self.region.grid


def side(
    layout: Layout,
    page_tokens: int,
    pages: int,
    *,
    shard: Shard | None = None,
    sharding: Sharding = Sharding.HEADS,
    per: Per = Per.TOKEN,
    interleave: int = 1,
    layered: bool = False,
) -> Side:
    shard = shard or Shard()
    divided = sharding in (Sharding.HEADS, Sharding.RANK)
    axis = 1 if divided else None
    parts = (
        Part("k", DType.U8, (2, HEADS, 2), per, axis),
        Part("v", DType.U8, (1, HEADS, 1), per, axis),
    )
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MAMBA if per is Per.PAGE else PoolKind.MHA,
        parts=parts,
        layers=LAYERS,
        page_tokens=page_tokens,
        layout=layout,
        sharding=sharding,
        interleave_tokens=interleave,
    )
    nbytes = pool.page_bytes(shard) * pages
    memory = np.zeros(nbytes, np.uint8)
    pieces: list[Any] = [memory]
    if layered and layout is Layout.LAYER_FIRST:
        pieces = []
        at = 0
        for part in parts:
            size = pool.part_bytes(part, shard) * pages
            for _ in pool.local_layers(shard):
                pieces.append(memory[at : at + size])
                at += size
    return Side(pool, shard, Region.of(pool, shard, pieces, pages), memory)


def byte_places(one: Side) -> dict[tuple[Any, ...], int]:
    """Return where every byte lies, by a plain loop over what it means."""
    grid = one.grid
    found = {}
    for part in grid.parts:
        for number, layer in enumerate(grid.layers):
            for page in range(grid.pages):
                for entry in range(grid.entries):
                    offset = entry
                    if grid.per is Per.TOKEN:
                        run, within = divmod(entry, grid.interleave_tokens)
                        index, count = grid.runs
                        offset = (run * count + index) * grid.interleave_tokens + within
                    for outer in range(part.outer):
                        for head in range(*part.heads):
                            at = (
                                int(part.bases[number])
                                + page * part.page_stride
                                + entry * part.token_stride
                                + outer * part.outer_stride
                                + (head - part.heads[0]) * part.head_stride
                            )
                            for byte in range(part.row_bytes):
                                what = (part.name, layer, page, offset, outer, head)
                                found[*what, byte] = at + byte
    return found


def plainly(
    mine: Side, theirs: Side, pages: list[int], slots: list[int]
) -> dict[int, int]:
    """Return remote to local address of every byte that both hold."""
    a, b = byte_places(mine), byte_places(theirs)
    pairs = {}
    tokens = mine.grid.page_tokens
    by_page = mine.grid.per is Per.PAGE
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, slot in enumerate(slots):
        page = pages[number if by_page else number // tokens]
        if slot >= 0 and page >= 0:
            there = (slot, 0) if by_page else divmod(slot, theirs.grid.page_tokens)
            here = (page, 0 if by_page else number % tokens)
            wanted.setdefault(here, []).append(there)
    for (part, layer, page, offset, *rest), at in a.items():
        for to_page, to_offset in wanted.get((page, offset), ()):
            there_at = b.get((part, layer, to_page, to_offset, *rest))
            if there_at is not None:
                pairs[there_at] = at
    return pairs


def as_bytes(rows: Rows) -> dict[int, int]:
    found = {}
    columns = (rows.local.tolist(), rows.remote.tolist(), rows.sizes.tolist())
    for a, b, size in zip(*columns, strict=True):
        for at in range(size):
            assert b + at not in found, "a byte of the peer is written twice"
            found[b + at] = a + at
    return found


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Side, Side, list[int], list[int]]:
    per = draw(st.sampled_from([Per.TOKEN, Per.TOKEN, Per.PAGE]))
    shardings = [Sharding.HEADS, Sharding.REPLICATED]
    if per is Per.TOKEN:
        shardings.append(Sharding.DCP)
    sharding = draw(st.sampled_from(shardings))

    def one() -> Side:
        size = draw(st.sampled_from([1, 2, 4]))
        rank = draw(st.integers(0, size - 1))
        dcp = draw(st.sampled_from([1, 2])) if sharding is Sharding.DCP else 1
        dcp = min(dcp, size)
        layers = draw(st.sampled_from([None, (0, 3), (2, 8)]))
        shard = Shard(
            tp_rank=rank,
            tp_size=size,
            dcp_size=dcp,
            dcp_rank=rank % dcp,
            layers=layers,
        )
        page_tokens = draw(st.sampled_from([1, 2, 4]))
        if dcp > 1:
            page_tokens = 4
        return side(
            draw(st.sampled_from(list(Layout))),
            page_tokens,
            draw(st.integers(2, 3)),
            shard=shard,
            sharding=sharding,
            per=per,
            interleave=2 if sharding is Sharding.DCP else 1,
            layered=draw(st.booleans()),
        )

    mine, theirs = one(), one()
    by_page = per is Per.PAGE
    room = theirs.grid.pages * (1 if by_page else theirs.grid.page_tokens)
    most = min(room, mine.grid.pages * (1 if by_page else mine.grid.page_tokens))
    count = draw(st.integers(0, most))
    slots = draw(st.permutations(range(room)))[:count]
    if draw(st.booleans()):
        slots = sorted(slots)
    slots = [slot if draw(st.integers(0, 9)) else -1 for slot in slots]
    needed = count if by_page else mine.grid.positions(count)
    pages = draw(st.permutations(range(mine.grid.pages)))[:needed]
    if draw(st.booleans()):
        pages = sorted(pages)
    return mine, theirs, list(pages), list(slots)


def matched(mine: Side, theirs: Side, pages: list[int], slots: list[int]) -> Rows:
    given = (np.array(pages, np.int64), np.array(slots, np.int64))
    return match(mine.grid, theirs.grid, *given)


@given(exchanges())
def test_rows_are_the_bytes_that_a_plain_loop_finds(
    case: tuple[Side, Side, list[int], list[int]],
) -> None:
    rows = matched(*case)
    wanted = plainly(*case)
    assert as_bytes(rows) == wanted
    joined = coalesce(rows)
    assert as_bytes(joined) == wanted
    ends = zip(joined.local + joined.sizes, joined.remote + joined.sizes, strict=True)
    starts = zip(joined.local, joined.remote, strict=True)
    assert not {*ends} & {*starts}, "two rows that are neighbours were not joined"


@given(exchanges())
def test_rows_through_a_packed_page_arrive_where_direct_ones_do(
    case: tuple[Side, Side, list[int], list[int]],
) -> None:
    mine, theirs, pages, slots = case
    mine.memory[:] = np.random.default_rng(1).integers(0, 256, mine.memory.size)
    grid = packed(mine.grid, theirs.grid, 0, max(1, len(pages)))
    page_bytes = grid.parts[0].page_stride
    area = np.zeros(grid.pages * page_bytes + 1, np.uint8)
    grid = packed(mine.grid, theirs.grid, area.ctypes.data, grid.pages)
    assert grid.page_bytes == page_bytes
    by_page = mine.grid.per is Per.PAGE
    number = np.arange(len(pages))
    there = np.array(slots, np.int64)
    landing = number if by_page else np.arange(len(slots))
    kept = np.where(there < 0, -1, landing)
    chosen = np.array(pages, np.int64)
    move(coalesce(match(mine.grid, grid, chosen, kept)))
    move(coalesce(match(grid, theirs.grid, number, there)))
    wanted = plainly(*case)
    base = theirs.memory.ctypes.data
    expected = np.zeros_like(theirs.memory)
    for remote, local in wanted.items():
        expected[remote - base] = ctypes.string_at(local, 1)[0]
    assert (theirs.memory == expected).all()
    assert area[-1] == 0


def carried(grid: Grid) -> Grid:
    """Send a grid to a peer, as part of an offer."""
    offer = Offer(
        pool="kv",
        transport="any",
        endpoint=b"",
        grid=grid,
        compatibility="x",
        required=True,
        epoch=Epoch("p", 0),
    )
    return Offer.from_bytes(offer.to_bytes()).grid


@given(exchanges())
def test_a_grid_comes_back_from_its_bytes(
    case: tuple[Side, Side, list[int], list[int]],
) -> None:
    mine, theirs, pages, slots = case
    again = carried(theirs.grid)
    given = (np.array(pages, np.int64), np.array(slots, np.int64))
    one, other = match(mine.grid, theirs.grid, *given), match(mine.grid, again, *given)
    assert as_bytes(one) == as_bytes(other)


def many(grid: Grid, **changed: Any) -> Grid:
    """Change the first part of a grid."""
    first = attrs.evolve(grid.parts[0], **changed)
    return attrs.evolve(grid, parts=(first, *grid.parts[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda grid: attrs.evolve(grid, pages=0),
        lambda grid: attrs.evolve(grid, layers=(*grid.layers, 9)),
        lambda grid: attrs.evolve(grid, layers=grid.layers[:1] * len(grid.layers)),
        lambda grid: attrs.evolve(grid, runs=(1, 1)),
        lambda grid: attrs.evolve(grid, runs=(0, 1 << 40)),
        lambda grid: attrs.evolve(grid, rank=(2, 2)),
        lambda grid: attrs.evolve(grid, parts=()),
        lambda grid: attrs.evolve(grid, parts=grid.parts[:1] * 2),
        lambda grid: attrs.evolve(grid, pages=1 << 55),
        lambda grid: many(grid, row_bytes=0),
        lambda grid: many(grid, bases=grid.parts[0].bases[:-1]),
        lambda grid: many(grid, bases=grid.parts[0].bases - (1 << 62)),
        lambda grid: many(grid, heads=(4, 2)),
        lambda grid: many(grid, page_stride=1 << 60),
        lambda grid: many(grid, outer=1 << 50, outer_stride=1 << 50),
    ],
)
def test_a_grid_that_contradicts_itself_is_rejected(
    change: Callable[[Grid], Grid],
) -> None:
    wrong = change(side(Layout.PAGE_FIRST, 4, 2).grid)
    with pytest.raises(MessageError):
        carried(wrong)


def test_states_of_ranks_match_only_their_own_rank() -> None:
    one, other = (
        side(
            Layout.PAGE_OBJECT,
            4,
            2,
            sharding=Sharding.RANK,
            per=Per.PAGE,
            shard=Shard(tp_rank=rank, tp_size=2),
        )
        for rank in (0, 1)
    )
    with pytest.raises(RegionError, match="same tensor-parallel size"):
        matched(one, other, [0], [0])
    assert matched(one, one, [0], [1]).nbytes == one.grid.page_bytes


def test_pages_and_slots_outside_of_the_memory_are_rejected() -> None:
    one = side(Layout.PAGE_OBJECT, 4, 2)
    with pytest.raises(RegionError, match="page 2 is outside of 2"):
        matched(one, one, [2], [0])
    with pytest.raises(RegionError, match="slot of the peer 8 is outside of 8"):
        matched(one, one, [0], [8])
    with pytest.raises(RegionError, match="take 1 pages"):
        matched(one, one, [0, 1], [0])


def test_contiguous_pages_become_one_row_for_each_page_and_layer() -> None:
    mine, theirs = side(Layout.PAGE_OBJECT, 8, 4), side(Layout.LAYER_FIRST, 1, 64)
    rows = matched(mine, theirs, [0, 1], list(range(16)))
    assert rows.count == 16 * len(LAYERS) * 2
    assert len(coalesce(rows)) == 2 * len(LAYERS) * 2
    whole = side(Layout.PAGE_OBJECT, 8, 4)
    assert len(coalesce(matched(mine, whole, [0, 1], list(range(16))))) == 1


@given(
    st.sampled_from(list(Layout)),
    st.sampled_from(list(Layout)),
    st.sampled_from([2, 4]),
    st.permutations(range(4)),
    st.permutations(range(4)),
)
def test_whole_pages_are_matched_as_their_tokens_would_be(
    mine: Layout, theirs: Layout, tokens: int, pages: list[int], others: list[int]
) -> None:
    a, b = side(mine, tokens, 4), side(theirs, tokens, 4)
    slots = [page * tokens + token for page in others for token in range(tokens)]
    found = matched(a, b, pages, slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_whole_pages", lambda *_: None)
        singly = matched(a, b, pages, slots)
    assert found.count == singly.count
    assert as_bytes(found) == as_bytes(singly) == plainly(a, b, pages, slots)
