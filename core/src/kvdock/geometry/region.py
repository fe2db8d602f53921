"""The place of a pool in host memory.

In every layout the address of a piece of a page is affine in the page index:
`base + page * stride`. A `Region` keeps those pairs as arrays, so a batch of
pages becomes addresses in one numpy expression, without an object per page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import RegionError
from kvdock.geometry.grid import Grid
from kvdock.pools.enums import Layout
from kvdock.pools.layout import slice_axes, stored_objects
from kvdock.pools.objects import LAYOUT_AXES, StoredObject
from kvdock.validators import as_int, is_int

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.pools.part import Part
    from kvdock.pools.rows import RowLayout
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


@attrs.frozen
class Block:
    """One contiguous piece of host memory: address and size in bytes."""

    address: int
    nbytes: int


def block_of(memory: object) -> Block:
    """Return where an object's bytes lie.

    Args:
        memory: A host tensor (`data_ptr()` and `nbytes`), a `Block`, or a
            writable, C-contiguous object with the buffer protocol.

    Raises:
        RegionError: If the memory is not contiguous, not writable, or not on
            the host.
    """
    if isinstance(memory, Block):
        return memory
    kind = type(memory).__name__
    if hasattr(memory, "data_ptr"):
        tensor = cast("Any", memory)
        if getattr(getattr(tensor, "device", None), "type", "cpu") != "cpu":
            raise RegionError(f"the {kind} lies on {tensor.device}, not on the host")
        if not tensor.is_contiguous():
            raise RegionError(f"the {kind} is not contiguous")
        return Block(int(tensor.data_ptr()), int(tensor.nbytes))
    try:
        view = memoryview(cast("Any", memory))
    except TypeError as error:
        raise RegionError(
            f"a {kind} has no bytes to point at",
            fix="Pass a host tensor, an object with the buffer protocol, or a Block.",
        ) from error
    if view.readonly or not view.c_contiguous:
        raise RegionError(f"the {kind} is not writable, C-contiguous memory")
    if not view.nbytes:
        return Block(0, 0)
    # Going through numpy keeps no export of the buffer open.
    return Block(int(np.frombuffer(view, np.uint8).ctypes.data), view.nbytes)


@attrs.frozen(eq=False)
class Region:
    """Host memory of one pool on one rank, as affine maps of page indices.

    Args:
        pool: The pool's name, for messages.
        pages: Number of pages that the memory holds.
        objects: What one page is stored as, in key order.
        bases: int64 (objects, segments), host byte addresses of page 0.
        strides: int64 (objects, segments), bytes from a page to the next.
        sizes: int64 (objects, segments), bytes; 0 pads a shorter row.
        layout: How the pages lie; says in which order an object has its bytes.
        blocks: The memory itself, for backends that register it.
        owners: Whatever must stay alive while the region is in use.
        grid: Where each token's bytes lie, for peers; None for rows with gaps, and
            for pools whose parts are counted differently.
    """

    pool: str
    pages: int
    objects: tuple[StoredObject, ...]
    bases: Int64Array = attrs.field(repr=False)
    strides: Int64Array = attrs.field(repr=False)
    sizes: Int64Array = attrs.field(repr=False)
    layout: Layout
    blocks: tuple[Block, ...]
    owners: tuple[object, ...] = attrs.field(default=(), repr=False)
    grid: Grid | None = attrs.field(default=None, repr=False)
    object_bytes: Int64Array = attrs.field(init=False, repr=False)
    """Bytes of each object of a page, int64 (objects,)."""
    page_bytes: int = attrs.field(init=False, repr=False)
    """Bytes of a page, all objects together."""
    _repeated: Int64Array = attrs.field(init=False, repr=False)
    """The sizes of as many pages, int64 (pages, segments): a view of one row."""

    @object_bytes.default
    def _sum_objects(self) -> Int64Array:
        return cast("Int64Array", self.sizes.sum(axis=1))

    @page_bytes.default
    def _sum_pages(self) -> int:
        return int(self.sizes.sum())

    @_repeated.default
    def _repeat_sizes(self) -> Int64Array:
        row = self.sizes[:1]
        return np.broadcast_to(row, (self.pages if len(row) else 0, row.shape[1]))

    @classmethod
    def of(
        cls,
        pool: PoolSpec,
        shard: Shard,
        memory: Sequence[object],
        pages: int,
    ) -> Region:
        """Describe a pool's memory.

        Args:
            pool: The pool, with the layout in which its pages lie.
            shard: The slice that this process holds.
            memory: One piece for the whole pool; or one for each part (not
                for PAGE_OBJECT, whose parts lie side by side in a page); or,
                for LAYER_FIRST, one for each layer of each part, part by
                part. Each is a tensor, a buffer or a `Block`. None at all for
                a pool that has no bytes here.
            pages: How many pages the memory holds.

        Raises:
            RegionError: If the memory is not as large as the pages.
        """
        pages = as_int(pages)
        if not is_int(pages):
            raise RegionError(
                f"pool {pool.name!r}: pages is a whole number, not {pages!r}"
            )
        objects = stored_objects(pool, shard)
        if not pool.physical or not objects:
            if memory:
                raise RegionError(
                    f"pool {pool.name!r} has no bytes on this rank, but was given "
                    f"{len(memory)} pieces of memory"
                )
            none = np.zeros((len(objects), 0), np.int64)
            return cls(pool.name, pages, objects, none, none, none, pool.layout, ())
        if pages < 1:
            raise RegionError(f"pool {pool.name!r}: {pages} pages are not memory")
        blocks = tuple(block_of(piece) for piece in memory)
        origins = _origins(pool, shard, blocks, pages)
        rows = [
            _merged(
                run
                for part in pool.parts
                if part.name in stored.parts
                for run in _runs(pool, shard, part, stored, origins[part.name], pages)
            )
            for stored in objects
        ]
        width = max(map(len, rows))
        table = np.zeros((3, len(rows), width), np.int64)
        for index, row in enumerate(rows):
            if row:
                table[:, index, : len(row)] = np.array(row, np.int64).T
        bases, strides, sizes = table
        return cls(
            pool=pool.name,
            pages=pages,
            objects=objects,
            bases=bases,
            strides=strides,
            sizes=sizes,
            layout=pool.layout,
            blocks=blocks,
            owners=tuple(memory),
            grid=Grid.of(pool, shard, origins, pages),
        )

    @classmethod
    def of_rows(
        cls, pool: PoolSpec, shard: Shard, memory: object, pages: int, rows: RowLayout
    ) -> Region:
        """Describe a pool whose pages are parts of rows.

        Args:
            pool: The pool, in layout PAGE_OBJECT, with `rows.page_bytes` a page
                and `len(rows.runs)` pieces.
            shard: The slice that this process holds.
            memory: The rows, of all pools and ranks that share them: a tensor, a
                buffer or a `Block`.
            pages: How many rows there are.
            rows: Which bytes of a row are the page.

        Raises:
            RegionError: If pool, memory and rows do not fit together.
        """
        objects = stored_objects(pool, shard)
        if len(objects) != 1 or pool.layout is not Layout.PAGE_OBJECT:
            raise RegionError(
                f"pool {pool.name!r} lies in rows and has {len(objects)} objects a "
                f"page in layout {pool.layout}",
                fix="Describe it as one object a page, in layout page_object.",
            )
        if pool.page_bytes(shard) != rows.page_bytes or pool.pieces != len(rows.runs):
            raise RegionError(
                f"pool {pool.name!r} has {pool.page_bytes(shard)} bytes a page in "
                f"{pool.pieces} pieces, but its rows have {rows.page_bytes} in "
                f"{len(rows.runs)}",
                fix="Use RowLayout.page_bytes, and pieces=len(RowLayout.runs).",
            )
        block = block_of(memory)
        if pages < 1 or block.nbytes < pages * rows.row_bytes or block.address <= 0:
            raise RegionError(
                f"pool {pool.name!r}: {pages} rows of {rows.row_bytes} bytes do not "
                f"lie in {block.nbytes} bytes at {block.address}"
            )
        starts, sizes = np.array(rows.runs, np.int64).T
        return cls(
            pool=pool.name,
            pages=pages,
            objects=objects,
            bases=(block.address + starts)[None, :],
            strides=np.full((1, len(starts)), rows.row_bytes),
            sizes=sizes[None, :],
            layout=pool.layout,
            blocks=(block,),
            owners=(memory,),
        )

    @property
    def physical(self) -> bool:
        """Return whether a page has bytes in this memory."""
        return bool(self.bases.size)

    @property
    def buffers(self) -> int:
        """Number of contiguous pieces of the largest object of a page."""
        return int(self.sizes.shape[1])

    def check(self, pages: npt.ArrayLike) -> Int64Array:
        """Return page indices as int64 after a bounds check.

        Raises:
            RegionError: If an index lies outside of the region.
        """
        given = np.asarray(pages)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise RegionError(
                f"pool {self.pool!r}: page indices are a row of whole numbers, "
                f"not {given.dtype} {given.shape}"
            )
        indices = given.astype(np.int64, copy=False)
        if indices.size == 1 and 0 <= indices[0] < self.pages:
            return indices
        if indices.size and (indices.min() < 0 or indices.max() >= self.pages):
            wrong = given[(indices < 0) | (indices >= self.pages)][0]
            raise RegionError(
                f"pool {self.pool!r}: page index {wrong} is outside of "
                f"its {self.pages} pages"
            )
        return indices

    def addresses(self, pages: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Turn page indices into addresses and sizes.

        Args:
            pages: int64 (n,), page indices.

        Returns:
            Addresses and sizes, int64 (n * objects, segments), page-major, in
            key order. The sizes are a read-only view that repeats one page's.

        Raises:
            RegionError: If an index lies outside of the region.
        """
        return self.locate(self.check(pages))

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Turn page indices that were checked into addresses and sizes."""
        if len(self.objects) == 1:
            rows = indices[:, None] * self.strides[0] + self.bases[0]
            # One object a page: the repeated row stays a view of one page's sizes.
            sizes = self._repeated[: len(rows)]
            if len(sizes) < len(rows):
                sizes = np.broadcast_to(self.sizes[0], rows.shape)
            return rows, sizes
        shape = (len(indices) * len(self.objects), self.buffers)
        where = self.bases + indices[:, None, None] * self.strides
        sizes = np.broadcast_to(self.sizes, (len(indices), *self.sizes.shape))
        return where.reshape(shape), sizes.reshape(shape)

    def gather(self, pages: npt.ArrayLike, out: npt.NDArray[np.uint8]) -> None:
        """Copy pages into contiguous rows.

        Args:
            pages: int64 (n,), page indices.
            out: uint8 (n, bytes of a page), objects side by side.
        """
        indices = self.check(pages)
        for source, target in self._columns(indices, out):
            target[:] = source[indices]

    def scatter(self, pages: npt.ArrayLike, rows: npt.NDArray[np.uint8]) -> None:
        """Copy contiguous rows back into pages; the reverse of `gather`."""
        indices = self.check(pages)
        for target, source in self._columns(indices, rows):
            target[indices] = source

    def _columns(
        self, indices: Int64Array, rows: npt.NDArray[np.uint8]
    ) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        total = int(self.object_bytes.sum())
        if rows.shape != (len(indices), total) or rows.dtype != np.uint8:
            raise RegionError(
                f"pool {self.pool!r}: {len(indices)} pages need uint8 rows of {total} "
                f"bytes, not {rows.dtype} {rows.shape}"
            )
        columns = []
        start = 0
        flat = (
            table.ravel().tolist() for table in (self.bases, self.strides, self.sizes)
        )
        for base, stride, size in zip(*flat, strict=True):
            if size:
                view = array_at(base, (self.pages, size), (stride, 1), "|u1")
                columns.append((view, rows[:, start : start + size]))
                start += size
        return columns


class _Memory:
    """Raw memory in numpy's own terms (the array interface, version 3)."""

    def __init__(self, **terms: object) -> None:
        self.__array_interface__ = {**terms, "version": 3}


def array_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str
) -> Any:  # noqa: ANN401 - of any type
    """Return raw memory as an array; its items may overlap.

    Args:
        address: Where the first item begins.
        shape: Number of items along each axis.
        strides: Bytes from one to the next along each axis.
        typestr: Type of an item, as numpy's array interface spells it.
    """
    memory = _Memory(
        data=(address, False), shape=shape, strides=strides, typestr=typestr
    )
    return np.asarray(memory)


def _origins(
    pool: PoolSpec, shard: Shard, blocks: tuple[Block, ...], pages: int
) -> dict[str, tuple[int, ...]]:
    """Return the addresses at which each part of page 0 begins.

    One address for a part whose layers lie in one piece, else one per layer.
    """
    layers = len(pool.local_layers(shard))
    each = [layers * pool.part_bytes(part, shard) for part in pool.parts]
    names = [part.name for part in pool.parts]
    if len(blocks) == 1:
        _check_piece(pool, "all parts", blocks[0], sum(each) * pages, pages)
        scale = 1 if pool.layout is Layout.PAGE_OBJECT else pages
        at = blocks[0].address
        return {name: (at + scale * sum(each[:n]),) for n, name in enumerate(names)}
    pieces = 1
    if pool.layout is Layout.LAYER_FIRST and len(blocks) == layers * len(each):
        pieces = layers
    elif len(blocks) != len(each) or pool.layout is Layout.PAGE_OBJECT:
        raise RegionError(
            f"pool {pool.name!r} in layout {pool.layout} was given {len(blocks)} "
            f"pieces of memory for {len(each)} parts and {layers} layers",
            fix="Pass one piece, one for each part, or for layer_first one for "
            "each layer of each part; page_object takes one alone.",
        )
    origins: dict[str, tuple[int, ...]] = {}
    for number, (name, nbytes) in enumerate(zip(names, each, strict=True)):
        own = blocks[number * pieces : (number + 1) * pieces]
        for layer, block in enumerate(own):
            what = f"part {name!r}" + (f" of layer {layer}" if pieces > 1 else "")
            _check_piece(pool, what, block, nbytes * pages // pieces, pages)
        origins[name] = tuple(block.address for block in own)
    return origins


def _check_piece(
    pool: PoolSpec, what: str, block: Block, nbytes: int, pages: int
) -> None:
    if block.nbytes != nbytes:
        raise RegionError(
            f"pool {pool.name!r}: {pages} pages take {nbytes} bytes for {what}, "
            f"but the memory has {block.nbytes}",
            fix="Check page_tokens, dtype, heads and layers against the memory.",
        )
    if nbytes and block.address <= 0:
        raise RegionError(f"pool {pool.name!r}: {what} lies at address {block.address}")


def _merged(runs: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join runs that touch: fewer pieces are fewer system calls."""
    joined: list[tuple[int, int, int]] = []
    for base, stride, size in runs:
        if joined:
            before, step, length = joined[-1]
            if before + length == base and step == stride:
                joined[-1] = (before, step, length + size)
                continue
        joined.append((base, stride, size))
    return joined


def _runs(
    pool: PoolSpec,
    shard: Shard,
    part: Part,
    stored: StoredObject,
    origins: tuple[int, ...],
    pages: int,
) -> list[tuple[int, int, int]]:
    """Return (base, stride, size) of an object's pieces of one part."""
    axes = slice_axes(pool, shard, part, stored)
    axes["page"] = (pages, 0, 1)
    _, first, last = axes["layer"]
    if len(origins) > 1:
        # Every layer is an array of its own.
        axes["layer"] = (1, 0, 1)
        origins = origins[first:last]
    order = LAYOUT_AXES[pool.layout]
    offsets, size, strides = _contiguous([axes[axis] for axis in order], part.row_bytes)
    stride = strides[order.index("page")]
    if pool.layout is Layout.PAGE_OBJECT:
        stride = pool.page_bytes(shard)
    return [
        (origin + int(at), stride, size) for origin in origins for at in offsets if size
    ]


def _contiguous(
    axes: list[tuple[int, int, int]], item_bytes: int
) -> tuple[Int64Array, int, list[int]]:
    """Cut a block of an array into runs of adjacent bytes.

    Args:
        axes: (extent, first, past the last) from the outermost axis inwards.
        item_bytes: Bytes of one innermost element.

    Returns:
        Offsets of the runs in the order of the axes, the bytes of a run, and
        the byte stride of each axis.
    """
    strides = [
        item_bytes * math.prod(extent for extent, _, _ in axes[index + 1 :])
        for index in range(len(axes))
    ]
    offsets = np.zeros(1, np.int64)
    size = item_bytes
    whole = True
    for (extent, first, last), stride in reversed(
        list(zip(axes, strides, strict=True))
    ):
        if whole:
            size *= last - first
            offsets += first * stride
            whole = last - first == extent
        else:
            steps = np.arange(first, last, dtype=np.int64) * stride
            offsets = (steps[:, None] + offsets).ravel()
    return offsets, size, strides
