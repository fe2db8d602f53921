"""Stores that people have at hand: files, SQLite, LMDB, RocksDB.

Each is opened as its users would for a cache: nothing is synced to a disk, what was
written outlives the process, and a page that is stored already is not written again.
All move between rows of one block of host memory and the store.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Rows = npt.NDArray[np.uint8]
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MAP_BYTES = 8 << 30


class Store(Protocol):
    """Pages under keys."""

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Store rows of the memory; those that are stored already stay."""

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Load pages into rows of the memory; return how many were found."""

    def look_up(self, keys: Sequence[str]) -> None:
        """Ask for pages before they are stored, outside of what is measured."""

    def settle(self) -> None:
        """End what goes on in the background: its processor time counts, too."""

    def drop(self, keys: Sequence[str]) -> None:
        """Delete pages, outside of what is measured."""

    def close(self) -> None:
        """Release the store."""


class _Plain:
    """What most of them have no need of."""

    def look_up(self, keys: Sequence[str]) -> None:
        """Nothing: `put` looks for itself."""

    def settle(self) -> None:
        """Nothing goes on."""


class FilePerPage(_Plain):
    """One file a page, written aside and renamed.

    Args:
        checked: Whether a file ends with the XXH3 of its page, compared when read.
    """

    def __init__(self, folder: Path, memory: Rows, *, checked: bool = False) -> None:
        self._folder = str(folder)
        self._rows = [memoryview(row) for row in memory]
        self._checked = checked

    def _tail(self, page: int) -> list[bytes]:
        return [xxhash.xxh3_64_digest(self._rows[page])] if self._checked else []

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Write each page that has no file."""
        for key, page in zip(keys, pages, strict=True):
            name = f"{self._folder}/{key}"
            if os.path.exists(name):  # noqa: PTH110 - a Path costs more
                continue
            fd = os.open(name + ".tmp", _NEW, 0o600)
            os.writev(fd, [self._rows[page], *self._tail(page)])
            os.close(fd)
            os.rename(name + ".tmp", name)  # noqa: PTH104 - same

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Open and read each file."""
        found = 0
        for key, page in zip(keys, pages, strict=True):
            try:
                fd = os.open(f"{self._folder}/{key}", os.O_RDONLY)
            except FileNotFoundError:
                continue
            tail = [bytearray(8)] if self._checked else []
            os.readv(fd, [self._rows[page], *tail])
            os.close(fd)
            found += tail == self._tail(page)
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Unlink files."""
        for key in keys:
            os.unlink(f"{self._folder}/{key}")  # noqa: PTH108 - same

    def close(self) -> None:
        """Nothing is held."""


class Sqlite(_Plain):
    """One table, a write-ahead log, a transaction for each batch."""

    def __init__(self, folder: Path, memory: Rows) -> None:
        self._memory = memory
        self._db = sqlite3.connect(folder / "pages.db", isolation_level=None)
        # What SQLite's own comparison of blobs with files recommends for blobs.
        self._db.execute("PRAGMA page_size = 16384")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("CREATE TABLE pages (key TEXT PRIMARY KEY, data BLOB)")

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Insert rows; those that are there cost a look into the index."""
        self._db.execute("BEGIN IMMEDIATE")
        for key, page in zip(keys, pages, strict=True):
            known = "SELECT 1 FROM pages WHERE key = ?"
            if self._db.execute(known, (key,)).fetchone() is None:
                row = (key, self._memory[page].data)
                self._db.execute("INSERT INTO pages VALUES (?, ?)", row)
        self._db.execute("COMMIT")

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Select each row, in one transaction."""
        found = 0
        self._db.execute("BEGIN")
        for key, page in zip(keys, pages, strict=True):
            select = "SELECT data FROM pages WHERE key = ?"
            row = self._db.execute(select, (key,)).fetchone()
            if row is not None:
                self._memory[page] = np.frombuffer(row[0], np.uint8)
                found += 1
        self._db.execute("COMMIT")
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Delete rows."""
        self._db.execute("BEGIN")
        delete = "DELETE FROM pages WHERE key = ?"
        self._db.executemany(delete, [(key,) for key in keys])
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the connection."""
        self._db.close()


class Lmdb(_Plain):
    """A map of memory that is written in place, a transaction for each batch."""

    def __init__(self, folder: Path, memory: Rows) -> None:
        self._memory = memory
        self._env: Any = import_module("lmdb").open(
            str(folder), map_size=_MAP_BYTES, sync=False, writemap=True
        )

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Put without overwriting."""
        with self._env.begin(write=True) as change:
            for key, page in zip(keys, pages, strict=True):
                change.put(key.encode(), self._memory[page].data, overwrite=False)

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Copy each page out of the map."""
        found = 0
        with self._env.begin(buffers=True) as reading:
            for key, page in zip(keys, pages, strict=True):
                data = reading.get(key.encode())
                if data is not None:
                    self._memory[page] = np.frombuffer(data, np.uint8)
                    found += 1
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """Delete pages."""
        with self._env.begin(write=True) as change:
            for key in keys:
                change.delete(key.encode())

    def close(self) -> None:
        """Unmap it."""
        self._env.close()


class RocksDb(_Plain):
    """Large values in blob files, no compression, the log on."""

    def __init__(self, folder: Path, memory: Rows) -> None:
        self._memory = memory
        self._library: Any = import_module("rocksdict")
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(create_if_missing=True)
        options.set_compression_type(self._library.DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_enable_blob_gc(True)
        self._db: Any = self._library.Rdict(str(folder), options)

    def put(self, keys: Sequence[str], pages: range) -> None:
        """Write what is not there as one batch."""
        batch = self._library.WriteBatch(raw_mode=True)
        for key, page in zip(keys, pages, strict=True):
            name = key.encode()
            if not self._db.key_may_exist(name) or name not in self._db:
                batch.put(name, self._memory[page].tobytes())
        self._db.write(batch)

    def get(self, keys: Sequence[str], pages: range) -> int:
        """Ask for all pages in one call, which verifies them."""
        found = 0
        every = self._db.get([key.encode() for key in keys])
        for data, page in zip(every, pages, strict=True):
            if data is not None:
                self._memory[page] = np.frombuffer(data, np.uint8)
                found += 1
        return found

    def settle(self) -> None:
        """Write out what waits in memory."""
        self._db.flush(True)

    def drop(self, keys: Sequence[str]) -> None:
        """Delete pages, and the files that only they were in."""
        for key in keys:
            self._db.delete(key.encode())
        self._db.flush(True)
        self._db.compact_range(None, None)

    def close(self) -> None:
        """Close it."""
        self._db.close()
