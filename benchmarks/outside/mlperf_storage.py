"""MLPerf Storage's KV cache benchmark, its interface: kvdock and files of NumPy.

Written anew from the documentation of `kv_cache_benchmark`, which no package brings: a
`StorageBackend` has `write`, `read`, `delete` and `clear`; a value is an array, the KV
of one stretch of a conversation, and a call returns the seconds of its parts.
`NumpyFiles` is what MLPerf's own class for a local disk does, a `.npy` file for each
entry, but it does not sync: kvdock does not either. `KvdockEntries` can be given to
MLPerf's own cache.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdock_store import attach

Entry = npt.NDArray[np.float16]
PAGE_BYTES = 1 << 20
STAGED = 128
"""Pages of a call: an array has memory of its own, which no engine's KV cache has."""


class IoTiming(NamedTuple):
    """Seconds of a call: all, of the device, of the host."""

    total: float
    device: float
    host: float


class NumpyFiles:
    """A `.npy` file for each entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, key: str, data: Entry) -> IoTiming:
        """Save an array."""
        begun = time.perf_counter()
        np.save(self._folder / f"{key}.npy", data, allow_pickle=False)
        return _timing(begun)

    def read(self, key: str) -> tuple[Entry, IoTiming]:
        """Load an array."""
        begun = time.perf_counter()
        try:
            data = np.load(self._folder / f"{key}.npy", allow_pickle=False)
        except FileNotFoundError:
            raise KeyError(key) from None
        return data, _timing(begun)

    def delete(self, key: str) -> None:
        """Delete an entry, if it is there."""
        (self._folder / f"{key}.npy").unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all entries."""
        for file in self._folder.glob("*.npy"):
            file.unlink()


class KvdockEntries:
    """Entries as pages of 1 MiB in kvdock's file backend, through registered memory."""

    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self._staging = np.ones((STAGED, PAGE_BYTES), np.uint8)
        self._cache = attach(folder, self._staging, quota_bytes)
        self._shapes: dict[str, tuple[tuple[int, ...], np.dtype[np.float16]]] = {}

    def write(self, key: str, data: Entry) -> IoTiming:
        """Copy an array to pages, and store them."""
        begun = time.perf_counter()
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._shapes[key] = (data.shape, data.dtype)
        hashes = self._hashes(key, flat.nbytes)
        self._cache.exists(hashes)
        for first, staged, part in self._parts(flat):
            staged[: len(part)] = part
            self._move("put", key, hashes[first : first + STAGED])
        return _timing(begun)

    def read(self, key: str) -> tuple[Entry, IoTiming]:
        """Load pages, verified, and copy them to an array."""
        begun = time.perf_counter()
        shape, dtype = self._shapes[key]
        data = np.empty(shape, dtype)
        flat = data.reshape(-1).view(np.uint8)
        hashes = self._hashes(key, flat.nbytes)
        for first, staged, part in self._parts(flat):
            self._move("get", key, hashes[first : first + STAGED])
            part[:] = staged[: len(part)]
        return data, _timing(begun)

    def delete(self, key: str) -> None:
        """Delete the pages of an entry, if it is there."""
        if key in self._shapes:
            shape, dtype = self._shapes.pop(key)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            self._cache.delete(self._hashes(key, nbytes))

    def clear(self) -> None:
        """Delete all entries."""
        self._shapes.clear()
        self._cache.clear()

    def close(self) -> None:
        """Release the attachment."""
        self._cache.close()

    def _hashes(self, key: str, nbytes: int) -> list[str]:
        pages = range(-(-nbytes // PAGE_BYTES))
        return [hashlib.sha256(f"{key} {one}".encode()).hexdigest() for one in pages]

    def _parts(
        self, flat: npt.NDArray[np.uint8]
    ) -> list[tuple[int, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Return the first page, the staging memory and the bytes of each call."""
        step = STAGED * PAGE_BYTES
        staged = self._staging.reshape(-1)
        starts = range(0, flat.nbytes, step)
        return [(at // PAGE_BYTES, staged, flat[at : at + step]) for at in starts]

    def _move(self, call: str, key: str, hashes: list[str]) -> None:
        pages = {"kv": np.arange(len(hashes))}
        if getattr(self._cache, call)(hashes, pages).pages != len(hashes):
            raise KeyError(key)


def _timing(begun: float) -> IoTiming:
    total = time.perf_counter() - begun
    return IoTiming(total, total, total)
