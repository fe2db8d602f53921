from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.arrays import ByteArray
from kvdock.errors import RegionError
from kvdock.geometry.region import Block, Region, block_of
from kvdock.pools.enums import (
    ContextSplit,
    DType,
    Layout,
    ObjectUnit,
    Per,
    PoolKind,
    Sharding,
)
from kvdock.pools.layout import count_buffers, stored_objects
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray

# Axes of the canonical array that the oracle slices.
CANONICAL = ("page", "layer", "token", "outer", "head", "row")
IN_MEMORY = {
    Layout.LAYER_FIRST: ("layer", "page", "token", "outer", "head", "row"),
    Layout.PAGE_FIRST: ("page", "token", "layer", "outer", "head", "row"),
    Layout.PAGE_FIRST_DIRECT: ("page", "layer", "token", "outer", "head", "row"),
    Layout.PAGE_HEAD: ("page", "head", "token", "layer", "outer", "row"),
    Layout.PAGE_OBJECT: ("page", "layer", "token", "outer", "head", "row"),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[PoolSpec, Shard]:
    sharding = draw(st.sampled_from(Sharding))
    tp_size = draw(st.sampled_from([1, 2, 4]))
    by_head = sharding is Sharding.HEADS
    heads = draw(st.sampled_from([2, 4, 8])) if by_head else 4
    parts = []
    for number in range(draw(st.integers(1, 3))):
        outer = draw(st.sampled_from([(), (2,)]))
        row = draw(st.sampled_from([(1,), (3,), (2, 2)]))
        divided = by_head or sharding is Sharding.RANK
        middle = (heads,) if divided else ()
        by_token = sharding is Sharding.DCP
        parts.append(
            Part(
                f"p{number}",
                draw(st.sampled_from([DType.U8, DType.BF16])),
                (*outer, *middle, *row),
                Per.TOKEN if by_token else draw(st.sampled_from(Per)),
                len(outer) if divided else None,
            )
        )
    group = 0
    if by_head:
        mine = max(1, heads // tp_size)
        group = draw(
            st.sampled_from([g for g in (0, 1, 2, mine) if not g or not mine % g])
        )
    pool = PoolSpec(
        name="some",
        kind=PoolKind.MHA,
        parts=parts,
        layers=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))),
        page_tokens=4,
        sharding=sharding,
        layout=draw(st.sampled_from(Layout)),
        head_group=group,
        object_unit=draw(st.sampled_from(ObjectUnit)),
    )
    tp_rank = draw(st.integers(0, tp_size - 1))
    dcp = draw(st.sampled_from([d for d in (1, 2, 4) if tp_size % d == 0]))
    first = draw(st.integers(0, pool.layers[-1]))
    shard = Shard(
        tp_rank=tp_rank,
        tp_size=tp_size,
        dcp_rank=tp_rank % dcp,
        dcp_size=dcp,
        layers=draw(st.sampled_from([None, (first, 10)])),
    )
    return pool, shard


def canonical(
    pool: PoolSpec, shard: Shard, pages: int, seed: int
) -> dict[str, ByteArray]:
    """Return one array of distinct bytes per part, indexed by CANONICAL."""
    random = np.random.default_rng(seed)
    return {
        part.name: random.integers(
            0,
            256,
            (
                pages,
                len(pool.local_layers(shard)),
                pool.entries(part, shard),
                part.outer,
                pool.local_units(part, shard),
                part.row_bytes,
            ),
            np.uint8,
        )
        for part in pool.parts
    }


def in_layout(pool: PoolSpec, arrays: dict[str, ByteArray]) -> list[ByteArray]:
    """Lay the arrays out as an engine with this layout would."""
    if pool.layout is Layout.PAGE_OBJECT:
        rows = [array.reshape(len(array), -1) for array in arrays.values()]
        return [np.ascontiguousarray(np.concatenate(rows, axis=1))]
    order = [CANONICAL.index(axis) for axis in IN_MEMORY[pool.layout]]
    return [np.ascontiguousarray(array.transpose(order)) for array in arrays.values()]


def expected(
    pool: PoolSpec, shard: Shard, arrays: dict[str, ByteArray], page: int
) -> list[bytes]:
    """Return the bytes of a page's objects by slicing the real arrays."""
    mine = pool.local_layers(shard)
    stored_order = [
        CANONICAL.index(axis) - 1 for axis in IN_MEMORY[pool.layout] if axis != "page"
    ]
    start = pool.local_heads(shard)[0]
    found = []
    for stored in stored_objects(pool, shard):
        layers = [mine.index(layer) for layer in stored.layers]
        heads = slice(None)
        if stored.heads is not None:
            heads = slice(stored.heads[0] - start, stored.heads[1] - start)
        found.append(
            b"".join(
                arrays[name][page][layers][:, :, :, heads]
                .transpose(stored_order)
                .tobytes()
                for name in stored.parts
            )
        )
    return found


def read(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[bytes]:
    return [
        b"".join(ctypes.string_at(int(a), int(n)) for a, n in zip(*row, strict=True))
        for row in zip(addresses, sizes, strict=True)
    ]


@given(cases(), st.integers(0, 2**16), st.integers(1, 5))
def test_addresses_name_the_bytes_that_the_array_has_there(
    case: tuple[PoolSpec, Shard], seed: int, pages: int
) -> None:
    pool, shard = case
    arrays = canonical(pool, shard, pages, seed)
    memory = in_layout(pool, arrays) if pool.local_layers(shard) else []
    region = Region.of(pool, shard, memory, pages)
    wanted = [seed % pages, pages - 1, 0]
    there = list(
        itertools.chain.from_iterable(
            expected(pool, shard, arrays, page) for page in wanted
        )
    )
    assert read(*region.addresses(wanted)) == there
    if pool.layout is Layout.LAYER_FIRST:
        # The same with an array for each layer of each part.
        pieces = [layer.copy() for array in memory for layer in array]
        assert read(*Region.of(pool, shard, pieces, pages).addresses(wanted)) == there
    if pages > 1:
        assert count_buffers(pool, shard) == region.buffers
    nbytes = [one.nbytes for one in stored_objects(pool, shard)]
    assert region.object_bytes.tolist() == nbytes
    assert sum(nbytes) == pool.page_bytes(shard)


@given(cases(), st.integers(0, 2**16))
def test_gather_and_scatter_move_whole_pages_and_touch_no_other(
    case: tuple[PoolSpec, Shard], seed: int
) -> None:
    pool, shard = case
    arrays = canonical(pool, shard, 4, seed)
    memory = in_layout(pool, arrays) if pool.local_layers(shard) else []
    region = Region.of(pool, shard, memory, 4)
    rows = np.zeros((2, int(region.object_bytes.sum())), np.uint8)
    region.gather([3, 1], rows)
    for row, page in zip(rows, (3, 1), strict=True):
        assert row.tobytes() == b"".join(expected(pool, shard, arrays, page))
    before = [piece.copy() for piece in memory]
    region.scatter([0, 1], rows)
    changed = {name: array.copy() for name, array in arrays.items()}
    for array in changed.values():
        array[0] = array[3]
    for after, wanted in zip(
        memory, in_layout(pool, changed) if memory else [], strict=True
    ):
        assert after.tobytes() == wanted.tobytes()
    assert len(before) == len(memory)


def pool_of(layout: Layout = Layout.LAYER_FIRST, **changes: Any) -> PoolSpec:
    given: dict[str, Any] = {
        "name": "kv",
        "kind": PoolKind.MHA,
        "parts": (
            Part("k", DType.U8, (2, 4), shard_axis=0),
            Part("v", DType.U8, (2, 2), shard_axis=0),
        ),
        "layers": (0, 3, 4),
        "page_tokens": 2,
        "layout": layout,
    }
    return PoolSpec(**(given | changes))


def test_a_head_group_is_one_run_of_bytes_only_where_heads_come_first() -> None:
    memory = np.zeros(5 * 3 * 24, np.uint8)
    segments = {
        layout: Region.of(
            pool_of(layout, head_group=1, object_unit="part"), Shard(), [memory], 5
        ).buffers
        for layout in Layout
    }
    assert segments[Layout.PAGE_HEAD] == 1
    assert segments[Layout.PAGE_FIRST_DIRECT] == 6, "layers x tokens"


@pytest.mark.parametrize("layout", Layout)
def test_memory_of_another_size_is_refused_by_name(layout: Layout) -> None:
    with pytest.raises(RegionError, match="pool 'kv': 5 pages take 360 bytes"):
        Region.of(pool_of(layout), Shard(), [Block(4096, 361)], 5)


def test_a_part_or_layer_of_another_size_is_refused_by_name() -> None:
    good = [Block(4096, 240), Block(8192, 120)]
    with pytest.raises(RegionError, match=r"120 bytes for part 'v', but .* has 121"):
        Region.of(pool_of(), Shard(), [good[0], Block(8192, 121)], 5)
    pieces = [Block(4096, 80)] * 3 + [Block(8192, 40)] * 2 + [Block(8192, 8)]
    with pytest.raises(RegionError, match="40 bytes for part 'v' of layer 2"):
        Region.of(pool_of(), Shard(), pieces, 5)


def test_a_null_address_is_refused() -> None:
    with pytest.raises(RegionError, match="all parts lies at address 0"):
        Region.of(pool_of(), Shard(), [Block(0, 360)], 5)


@pytest.mark.parametrize("pieces", [0, 3, 5])
def test_a_wrong_number_of_pieces_is_refused(pieces: int) -> None:
    with pytest.raises(RegionError, match=f"{pieces} pieces of memory for 2 parts"):
        Region.of(pool_of(), Shard(), [Block(4096, 80)] * pieces, 5)


def test_parts_of_a_page_object_lie_side_by_side_and_not_apart() -> None:
    with pytest.raises(RegionError, match="page_object takes one alone"):
        Region.of(pool_of(Layout.PAGE_OBJECT), Shard(), [Block(4096, 240)] * 2, 5)


def test_gather_refuses_rows_of_another_size() -> None:
    memory = np.zeros(360, np.uint8)
    region = Region.of(pool_of(), Shard(), [memory], 5)
    with pytest.raises(RegionError, match="2 pages need uint8 rows of 72 bytes"):
        region.gather([0, 1], np.zeros((2, 71), np.uint8))


def test_a_logical_anchor_has_places_without_bytes() -> None:
    anchor = PoolSpec(
        name="kv",
        kind=PoolKind.LOGICAL,
        parts=(),
        layers=(),
        page_tokens=4,
        anchor=True,
    )
    region = Region.of(anchor, Shard(), [], 9)
    addresses, sizes = region.addresses([0, 8])
    assert addresses.shape == sizes.shape == (2, 0)
    with pytest.raises(RegionError, match="outside of its 9 pages"):
        region.addresses([9])
    with pytest.raises(RegionError, match="has no bytes on this rank"):
        Region.of(anchor, Shard(), [bytearray(8)], 9)


def test_a_rank_without_layers_of_a_pool_needs_no_memory() -> None:
    pool = pool_of(context=ContextSplit.LAYERS)
    region = Region.of(pool, Shard(cp_rank=3, cp_size=4), [], 5)
    assert region.addresses([2])[0].shape == (0, 0)


def test_memory_must_be_writable_contiguous_host_memory() -> None:
    with pytest.raises(RegionError, match="not writable"):
        block_of(b"read only")
    with pytest.raises(RegionError, match="not writable, C-contiguous"):
        block_of(np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(RegionError, match="a object has no bytes"):
        block_of(object())
    assert block_of(bytearray()) == Block(0, 0)


class FakeTensor:
    """What the core knows of a tensor: four names."""

    def __init__(self, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.device = type("Device", (), {"type": device})()
        self.nbytes = 360
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return 4096

    def is_contiguous(self) -> bool:
        return self._contiguous


def test_a_tensor_is_taken_by_its_pointer() -> None:
    assert block_of(FakeTensor()) == Block(4096, 360)
    with pytest.raises(RegionError, match="not on the host"):
        block_of(FakeTensor(device="cuda"))
    with pytest.raises(RegionError, match="not contiguous"):
        block_of(FakeTensor(contiguous=False))


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_an_index_outside_of_the_region_names_pool_and_index(index: int) -> None:
    region = Region.of(pool_of(), Shard(), [Block(4096, 360)], 5)
    with pytest.raises(RegionError, match=f"pool 'kv': page index {index} is outside"):
        region.addresses([0, index])
