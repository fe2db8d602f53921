"""The seam between the index and the I/O that moves bytes.

The store decides what goes where; an engine moves it. One call carries many
objects as arrays, so that an engine may sort, merge and overlap them as its
interface likes best. Engines in sight: threads with positional I/O (here),
USRBIO rings, NIXL transfers.
"""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from kvdock.arrays import Int32Array, Int64Array, UInt64Array

DEADLINE = errno.ETIMEDOUT
"""Error of an object that was not begun before the deadline."""


_SPAN = 2**47  # user addresses of 64-bit Linux


EMPTY_CHECKSUM = xxhash.xxh3_64_intdigest(b"")
"""Checksum of an object without bytes."""


def address_space() -> memoryview:
    """Return a view in which index n is the byte at host address n.

    Slices of it are valid as long as the memory behind them is.
    """
    return memoryview((ctypes.c_ubyte * _SPAN).from_address(0))


def checksum(space: memoryview, addresses: list[int], sizes: list[int]) -> int:
    """Return the xxh3 of the pieces of one object, in order."""
    if len(addresses) == 1:
        start = addresses[0]
        return xxhash.xxh3_64_intdigest(space[start : start + sizes[0]])
    state = xxhash.xxh3_64()
    for start, size in zip(addresses, sizes, strict=True):
        state.update(space[start : start + size])
    return state.intdigest()


def checksums(
    addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the xxh3 of each object, uint64 (n,).

    For engines whose transfers bypass the processor; an engine that copies
    does better to sum each piece while it lies in the cache.

    Args:
        addresses: int64 (n, segments), host byte addresses.
        sizes: int64 (n, segments), bytes.
    """
    space = address_space()
    found = [
        checksum(space, at, length)
        for at, length in zip(addresses.tolist(), sizes.tolist(), strict=True)
    ]
    return np.array(found, np.uint64)


@attrs.frozen(eq=False)
class IORequest:
    """Objects to move between host memory and segments.

    Args:
        files: What `IOEngine.open_file` returned, one for each segment.
        file_of: int64 (n,), index into `files` for each object.
        offsets: int64 (n,), where each object begins in its file.
        addresses: int64 (n, segments), host byte addresses.
        sizes: int64 (n, segments), bytes; 0 pads a row.
        deadline_s: When to begin nothing more, on `time.monotonic()`'s clock.
    """

    files: tuple[int, ...]
    file_of: Int64Array = attrs.field(repr=False)
    offsets: Int64Array = attrs.field(repr=False)
    addresses: Int64Array = attrs.field(repr=False)
    sizes: Int64Array = attrs.field(repr=False)
    deadline_s: float = float("inf")

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.offsets)


@attrs.frozen(eq=False)
class IOResult:
    """What became of each object of a transfer, at its place.

    Args:
        errors: int32 (n,), 0 or an errno; `DEADLINE` for not begun.
        nbytes: int64 (n,), bytes that moved; fewer at the end of a file.
        checksums: uint64 (n,), xxh3 of the object's bytes in host memory;
            meaningful only where all bytes moved.
    """

    errors: Int32Array
    nbytes: Int64Array
    checksums: UInt64Array

    @classmethod
    def of(cls, count: int) -> IOResult:
        """Begin an answer in which nothing has moved."""
        return cls(
            np.full(count, DEADLINE, np.int32),
            np.zeros(count, np.int64),
            np.zeros(count, np.uint64),
        )


class IOEngine(Protocol):
    """Moves bytes between host memory and files.

    Called from any thread, several at a time. An engine bounds its own
    parallelism, and does not let a short call wait behind a long one. It
    keeps no reference to host memory once a call has returned. What fails
    for an object is that object's errno; nothing else is raised.
    """

    alignment: int
    """Slots begin and end at multiples of this, bytes; a power of two."""

    def open_file(self, name: str, folder: int, *, create: bool) -> int:
        """Open a segment's data for reading and, where that can be, writing.

        Args:
            name: File name within the folder; never a link.
            folder: Descriptor of the folder.
            create: Make the file; it must not be there yet.

        Returns:
            A token for `IORequest.files`: the descriptor itself for engines
            that need no more.

        Raises:
            OSError: If it cannot be opened.
        """

    def close_file(self, token: int) -> None:
        """Let go of a token; no transfer uses it any more."""

    def write(self, transfer: IORequest) -> IOResult:
        """Move objects from host memory to their segments."""

    def read(self, transfer: IORequest) -> IOResult:
        """Move objects from their segments to host memory."""

    def close(self) -> None:
        """End threads and connections; the engine is not used again."""
