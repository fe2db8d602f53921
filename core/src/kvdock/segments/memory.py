"""Host memory by address, and checksums over its scattered pieces.

A batch names memory by addresses. A ctypes array for each piece costs 0.3 us,
and 11 us where its size was not seen lately; slicing one view of the whole
address space costs 0.1 us, and touches nothing but the slice that is used.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import xxhash

_SPAN = 2**47  # user addresses of 64-bit Linux


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


EMPTY_CHECKSUM = xxhash.xxh3_64_intdigest(b"")
"""Checksum of an object without bytes."""


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
