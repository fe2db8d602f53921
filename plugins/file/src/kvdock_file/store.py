"""One file per object, written aside and renamed: nothing torn is ever seen."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import xxhash

from kvdock.batches import Batch, BatchResult, Operation, Outcome
from kvdock.hookspecs import AttachConfig
from kvdock.pools import PoolSpec

_TRAILER = struct.Struct("<4s32sQQ")  # magic, key digest, bytes, xxh3 of the bytes
_MAGIC = b"KVD1"


def _buffers(batch: Batch, row: int) -> list[ctypes.Array[ctypes.c_char]]:
    pieces = zip(batch.addresses[row], batch.sizes[row], strict=True)
    return [(ctypes.c_char * int(n)).from_address(int(at)) for at, n in pieces if n]


@attrs.frozen
class FileStore:
    """Objects of one pool in one namespace."""

    root: Path
    folder: Path

    @classmethod
    def open(cls, root: Path, config: AttachConfig, pool: PoolSpec) -> FileStore:
        """Create the folders of a pool."""
        folder = root / config.namespace / pool.name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(root, folder)

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch, key by key."""
        steps: dict[Operation, Callable[[Batch, int], Outcome]] = {
            Operation.EXISTS: self._exists,
            Operation.PUT: self._put,
            Operation.GET: self._get,
            Operation.DELETE: self._delete,
            Operation.CLEAR: self._clear,
        }
        step = steps[batch.operation]
        outcomes = np.full(len(batch), Outcome.TIMEOUT, np.uint8)
        for row in range(len(batch)):
            if time.monotonic() < batch.deadline_s:
                outcomes[row] = step(batch, row)
        return BatchResult.of(batch, outcomes)

    def _path(self, key: str) -> tuple[Path, bytes]:
        # Keys never become a path: their digest does.
        digest = hashlib.sha256(key.encode()).digest()
        return self.folder / digest.hex()[:2] / f"{digest.hex()}.page", digest

    def _exists(self, batch: Batch, row: int) -> Outcome:
        there = self._path(batch.keys[row])[0].exists()
        return Outcome.OK if there else Outcome.ABSENT

    def _put(self, batch: Batch, row: int) -> Outcome:
        path, digest = self._path(batch.keys[row])
        if path.exists():
            return Outcome.OK
        path.parent.mkdir(mode=0o700, exist_ok=True)
        pieces = _buffers(batch, row)
        check = xxhash.xxh3_64()
        for piece in pieces:
            check.update(piece)
        nbytes = sum(map(len, pieces))
        trailer = _TRAILER.pack(_MAGIC, digest, nbytes, check.intdigest())
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                if os.writev(file.fileno(), [*pieces, trailer]) != nbytes + len(
                    trailer
                ):
                    raise OSError("short write")
            Path(name).rename(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            return Outcome.REFUSED
        return Outcome.OK

    def _get(self, batch: Batch, row: int) -> Outcome:
        path, digest = self._path(batch.keys[row])
        pieces = _buffers(batch, row)
        wanted = sum(map(len, pieces))
        trailer = bytearray(_TRAILER.size)
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != wanted + len(trailer):
                    path.unlink(missing_ok=True)
                    return Outcome.CORRUPT
                got = os.preadv(file.fileno(), [*pieces, trailer], 0)
        except FileNotFoundError:
            return Outcome.ABSENT
        check = xxhash.xxh3_64()
        for piece in pieces:
            check.update(piece)
        good = _TRAILER.pack(_MAGIC, digest, wanted, check.intdigest())
        if got != wanted + len(trailer) or bytes(trailer) != good:
            path.unlink(missing_ok=True)
            return Outcome.CORRUPT
        return Outcome.OK

    def _delete(self, batch: Batch, row: int) -> Outcome:
        self._path(batch.keys[row])[0].unlink(missing_ok=True)
        return Outcome.OK

    def _clear(self, batch: Batch, row: int) -> Outcome:
        if batch.keys[row] != f"{self.folder.parent.name}/":
            return Outcome.REFUSED
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Outcome.OK
