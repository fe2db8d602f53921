"""Hashes and moves pages in compiled code, without the interpreter's lock.

The library is built from `pages.c` when kvdock is installed and there is a C compiler,
and is part of its wheels for Linux. Without it, or where the environment has
`KVDOCK_PURE=1`, Python does the same, and answers the same: it takes the lock for each
page, so one thread at a time moves small pages.
"""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from kvdock.arrays import Int32Array, Int64Array, UInt64Array
from kvdock.compiled import Library as Library
from kvdock.compiled import library as library

LEFT = -(2**31)
"""Error of an object that the library leaves to Python: its call failed, its memory
does not suit direct I/O, or it is very short."""

_SPAN = 2**47  # user addresses of 64-bit Linux
_SHORT = 128 << 10  # bytes that are hashed in the time in which a lock changes hands
_LATEST = 2**63 - 1
_PIECES = 256  # of an object, whose sizes a movement keeps where they are known to be


def address_space() -> memoryview:
    """Return a view in which index n is the byte at host address n.

    Slices of it are valid as long as the memory behind them is.
    """
    return memoryview((ctypes.c_ubyte * _SPAN).from_address(0)).cast("B")


def checksums(addresses: Int64Array, sizes: Int64Array) -> UInt64Array:
    """Return the xxh3 of each object over its pieces in order, uint64 (n,).

    Args:
        addresses: int64 (n, segments), host byte addresses.
        sizes: int64 (n, segments), bytes; 0 for no piece. May be a broadcast row, or
            (1, segments) for all.
    """
    compiled = library()
    count, pieces = addresses.shape
    if compiled is None or not count:
        return _checksums(addresses, sizes)
    rows, stride = _rows(sizes)
    starts = _in_one_block(addresses)
    found = np.empty(count, np.uint64)
    nbytes = int(rows.sum()) * (1 if stride else count)
    function = compiled.hash_locked if nbytes <= _SHORT else compiled.hash
    places = address_of(starts), address_of(rows), address_of(found)
    done = function(count, pieces, stride, *places)
    return found if done == count else _checksums(addresses, sizes)


def _checksums(addresses: Int64Array, sizes: Int64Array) -> UInt64Array:
    space = address_space()
    sizes = np.broadcast_to(sizes, addresses.shape)
    if addresses.shape[1] == 1:
        # 0.4 us for each object, instead of 1.0 with a state of the hash.
        digest = xxhash.xxh3_64_intdigest
        each = zip(addresses[:, 0].tolist(), sizes[:, 0].tolist(), strict=True)
        sums = [digest(space[start : start + size]) for start, size in each]
        return np.array(sums, np.uint64)
    found = np.zeros(len(addresses), np.uint64)
    for row, pieces in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        state = xxhash.xxh3_64()
        for start, size in zip(*pieces, strict=True):
            state.update(space[start : start + size])
        found[row] = state.intdigest()
    return found


def _in_one_block(numbers: npt.ArrayLike) -> Int64Array:
    """Return numbers as the library reads them."""
    return np.ascontiguousarray(numbers, np.int64)


# Attributes are set for each call: without a frame for each of them.
@attrs.define(eq=False, kw_only=True, on_setattr=attrs.setters.NO_OP)
class Movement:
    """Objects that go between host memory and files: each `move` takes some of them.

    Adjacent objects share a system call. A row is hashed just before it is written,
    or just after it was read. Any number of threads may move rows at once.

    Args:
        compiled: The library.
        order: int64 (n,), in which rows are moved.
        files: int64 (n,), descriptors.
        offsets: int64 (n,), where objects begin in their files.
        sums: uint64 (n,), filled with the xxh3 of objects that were moved.
        nbytes: int64 (n,), filled with their bytes.
        errors: int32 (n,), filled with 0 or `LEFT`; as it was where it is too late.
    """

    compiled: Library = attrs.field(repr=False)
    order: Int64Array = attrs.field(repr=False, converter=_in_one_block)
    files: Int64Array = attrs.field(repr=False, converter=_in_one_block)
    offsets: Int64Array = attrs.field(repr=False, converter=_in_one_block)
    sums: UInt64Array = attrs.field(repr=False)
    nbytes: Int64Array = attrs.field(repr=False)
    errors: Int32Array = attrs.field(repr=False)
    # What the library reads, kept for as long as it does; see `begin`.
    write: int = attrs.field(default=0, init=False)
    addresses: Int64Array = attrs.field(init=False, repr=False)
    sizes: Int64Array = attrs.field(init=False, repr=False)
    _rows: Int64Array = attrs.field(init=False, repr=False)
    _row: Int64Array = attrs.field(init=False, repr=False)
    _row_at: int = attrs.field(init=False, repr=False)
    _expected: UInt64Array | None = attrs.field(default=None, init=False, repr=False)
    _words: Int64Array = attrs.field(init=False, repr=False)
    _at: int = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Write down where everything is that all calls have in common."""
        self._words = np.zeros(16, np.int64)
        self._row = np.zeros(_PIECES, np.int64)
        self._row_at = address_of(self._row)
        of = address_of
        self._words[7:10] = [of(self.order), of(self.files), of(self.offsets)]
        self._words[13:] = [of(self.sums), of(self.nbytes), of(self.errors)]
        self._at = address_of(self._words)

    def begin(
        self,
        addresses: Int64Array,
        sizes: Int64Array,
        *,
        write: int,
        granule: int,
        block: int = 0,
        flags: int = 0,
        deadline_s: float = float("inf"),
        expected: UInt64Array | None = None,
    ) -> None:
        """Say what is moved next.

        Args:
            addresses: int64 (n, segments), host byte addresses.
            sizes: int64 (n, segments), bytes; 0 for no piece. May be a broadcast row.
            write: 0 if objects come from the files; 1 if they go there; 2 if they go
                there as `hash_rows` has hashed them, and are not hashed again.
            granule: Most bytes of a system call.
            block: For direct I/O, the block of the files; else 0.
            flags: Of `preadv2`; only for reads.
            deadline_s: When to begin no call any more, on `time.monotonic()`'s clock.
            expected: uint64 (n,), or None. An object that is read and has another
                sum, or cannot be read, is zeroed.
        """
        addresses = np.ascontiguousarray(addresses, np.int64)
        pieces = addresses.shape[1]
        if pieces <= _PIECES and (len(sizes) == 1 or not sizes.strides[0]):
            # One row for all objects is copied: finding out where it is takes longer.
            self._row[:pieces] = sizes[0]
            rows_at, stride = self._row_at, 0
        else:
            self._rows, stride = _rows(sizes)
            rows_at = address_of(self._rows)
        sums = 0
        if expected is not None:
            expected = np.ascontiguousarray(expected, np.uint64)
            sums = address_of(expected)
        ends_ns = min(deadline_s * 1e9, _LATEST)
        self._words[:7] = write, pieces, stride, granule, block, flags, int(ends_ns)
        self._words[10:13] = address_of(addresses), rows_at, sums
        self.write, self.addresses, self.sizes = write, addresses, sizes
        self._expected = expected

    def leave_uncached(self, first: int, stop: int) -> None:
        """Make rows `LEFT` that take several calls, or may wait for a disk.

        The latter are those of which the page cache has not the last byte: reading one
        has the file system read ahead, whatever the flags. Files in memory (tmpfs) have
        no disk.
        """
        self.compiled.leave_uncached(self._at, first, stop)

    def hash_rows(self, first: int, stop: int) -> None:
        """Hash rows that are written afterwards; very short ones are `LEFT`."""
        self.compiled.hash_rows(self._at, first, stop)

    def move(self, first: int, stop: int) -> None:
        """Move the rows of `order` from first up to, not including, stop.

        Rows that are `LEFT` already stay so.
        """
        self.compiled.move(self._at, first, stop)


def _rows(sizes: Int64Array) -> tuple[Int64Array, int]:
    """Return sizes in one block of memory, and the words from a row to the next."""
    if len(sizes) == 1 or (len(sizes) and not sizes.strides[0]):
        return _in_one_block(sizes[:1]), 0
    return _in_one_block(sizes), sizes.shape[1]


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the host address of an array's first byte."""
    return int(array.__array_interface__["data"][0])
