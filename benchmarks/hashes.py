"""Speed of the compiled hash in the processor's cache, beside the wheel of xxhash.

Usage: python benchmarks/hashes.py [--quick]

Layer: `kvdock.native` alone. Pages of three sizes, 1 MiB in all, are hashed again and
again: by the wheel, one call a page, and by one call of the library for each width of
registers that the processor has (64: AVX-512, 32: AVX2, 16: SSE2, or NEON). All take
turns, and a figure is the median. The wheel takes the widest registers. The last line
is one JSON object: GB/s, and the library's part of the wheel's, which should be at
least 0.8 with AVX-512 and with AVX2.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt
import xxhash
from machine import describe

from kvdock import compiled

SIZES = {"8K": 8 << 10, "64K": 64 << 10, "1M": 1 << 20}
TOTAL_BYTES = 1 << 20
TURNS, QUICK_TURNS = 1000, 50


@attrs.define(eq=False)
class Pages:
    """Pages in the cache, and the ways to hash them."""

    memory: npt.NDArray[np.uint8]
    _views: list[memoryview] = attrs.field(init=False)
    _addresses: npt.NDArray[np.int64] = attrs.field(init=False)
    _sizes: npt.NDArray[np.int64] = attrs.field(init=False)
    sums: npt.NDArray[np.uint64] = attrs.field(init=False)
    _arguments: tuple[int, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Write down where the pages are."""
        count, page_bytes = self.memory.shape
        self._views = [memoryview(page) for page in self.memory]
        self._addresses = self.memory.ctypes.data + page_bytes * np.arange(count)
        self._sizes = np.array([page_bytes])
        self.sums = np.zeros(count, np.uint64)
        arrays = self._addresses, self._sizes, self.sums
        self._arguments = (count, 1, 0, *(array.ctypes.data for array in arrays))

    def wheel(self) -> None:
        """Hash each page in a call."""
        digest = xxhash.xxh3_64_intdigest
        for view in self._views:
            digest(view)

    def hash_all(self, functions: compiled.Library) -> None:
        """Hash all in one call."""
        functions.hash_locked(*self._arguments)

    def check(self) -> None:
        """Compare what the library has found."""
        expected = [xxhash.xxh3_64_intdigest(view) for view in self._views]
        assert self.sums.tolist() == expected  # noqa: S101 - else it measures nothing


def measure(page_bytes: int, turns: int) -> dict[str, float]:
    """Return the GB/s of each way: the wheel, and widths of registers."""
    shape = (TOTAL_BYTES // page_bytes, page_bytes)
    pages = Pages(np.random.default_rng(1).integers(0, 256, shape, np.uint8))
    ways = {"wheel": pages.wheel}
    functions = compiled.library()
    if functions is not None:
        width = ctypes.c_int64.in_dll(
            ctypes.CDLL(compiled.library_path()), "kvdock_register_bytes"
        )
        widest = width.value

        def hash_by(register_bytes: int) -> None:
            width.value = register_bytes
            pages.hash_all(functions)

        for register_bytes in (64, 32, 16):
            if register_bytes <= widest:
                ways[f"{register_bytes}"] = partial(hash_by, register_bytes)
                pages.sums[:] = 0
                hash_by(register_bytes)
                pages.check()
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - began)
    if functions is not None:
        width.value = widest
    return {
        name: TOTAL_BYTES / statistics.median(times) / 1e9
        for name, times in took.items()
    }


def main() -> None:
    """Print a line for each size, and the figures."""
    turns = QUICK_TURNS if "--quick" in sys.argv[1:] else TURNS
    figures: dict[str, object] = {"machine": describe()}
    for size, page_bytes in SIZES.items():
        rates = measure(page_bytes, turns)
        wheel = rates["wheel"]
        print(
            f"{size:>4}", *(f"{name} {rate:.1f} GB/s" for name, rate in rates.items())
        )
        for name, rate in rates.items():
            figures[f"hash_{size}_{name}_gbps"] = round(rate, 1)
            if name != "wheel":
                figures[f"hash_{size}_{name}_of_wheel"] = round(rate / wheel, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
