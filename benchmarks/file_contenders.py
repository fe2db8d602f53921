"""The contenders of `file.py`: each stores and loads batches of pages.

All of them move between one warm pool of host memory and one file system.
`put` and `get` return the seconds of the calls alone.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import attrs
import numpy as np
import xxhash

from kvdock import (
    AttachConfig,
    Batch,
    Dock,
    DType,
    Operation,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.pools import Part

if TYPE_CHECKING:
    import numpy.typing as npt

RAW_FILES = 3
QUOTA_BYTES = 2 << 30  # of kvdock's store: a small one for a real disk

Rows = list[list[int]]
"""Batches: page numbers of each."""


@attrs.frozen(eq=False)
class Pool:
    """Warm host memory: what is stored, and where it is loaded to."""

    page_bytes: int
    source: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, pages: int, page_bytes: int) -> Self:
        """Make a pool of random pages, every byte of it touched."""
        rng = np.random.default_rng(7)
        # Direct I/O wants memory that begins at a page.
        source, target = (
            np.frombuffer(mmap.mmap(-1, pages * page_bytes), np.uint8)
            .reshape(pages, page_bytes) for _ in range(2)
        )  # fmt: skip
        source.view(np.int64)[:] = rng.integers(
            0, 2**63, (pages, page_bytes // 8), dtype=np.int64
        )
        target[:] = 1
        return cls(page_bytes, source, target)

    def wrong(self, pages: list[int]) -> int:
        """Count pages whose target is not their source, and wipe the target."""
        bad = int((self.source[pages] != self.target[pages]).any(axis=1).sum())
        self.target[pages] = 0
        return bad


class Contender(Protocol):
    """Something that stores pages under numbers and loads them again."""

    def put(self, batches: Rows, turn: int) -> float:
        """Store the pages of each batch again; return the seconds."""

    def get(self, batches: Rows, turn: int) -> float:
        """Load what turn stored; return the seconds."""

    def close(self) -> None:
        """Give the space back."""


class Raw:
    """The limit: positional I/O into files that were written before.

    Each turn has the next of a few files, so that the place of one in memory or on
    disk does not decide: kvdock's pages lie in sixteen segments or more.

    Args:
        root: An empty folder.
        pool: The memory.
        threads: How many share the pages of a batch.
        direct: Whether to bypass the page cache.
        synced: Whether a put ends once its pages are on the disk.
        hashed: Whether pages are hashed before they are written, and once read.
    """

    def __init__(
        self,
        root: Path,
        pool: Pool,
        threads: int = 1,
        *,
        direct: bool = False,
        synced: bool = False,
        hashed: bool = False,
    ) -> None:
        root.mkdir()
        self._hashed = hashed
        self._pool = pool
        self._size = pool.page_bytes
        self._threads = threads
        self._workers = ThreadPoolExecutor(threads)
        self._synced = synced
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self._fds = [os.open(root / f"raw{n}", flags, 0o600) for n in range(RAW_FILES)]
        for fd in self._fds:
            os.posix_fallocate(fd, 0, pool.source.nbytes)
            os.pwrite(fd, pool.source.reshape(-1)[: 1 << 30].data, 0)
        self._from = [memoryview(row) for row in pool.source]
        self._into = [memoryview(row) for row in pool.target]

    def put(self, batches: Rows, turn: int) -> float:
        """Write every page at its own offset."""
        return self._timed(batches, turn, os.pwritev, self._from)

    def get(self, batches: Rows, turn: int) -> float:
        """Read every page from its own offset."""
        return self._timed(batches, turn, os.preadv, self._into)

    def _timed(
        self, batches: Rows, turn: int, call: object, views: list[memoryview]
    ) -> float:
        fd, size = self._fds[turn % RAW_FILES], self._size

        def move(pages: list[int]) -> None:
            for page in pages:
                if self._hashed and views is self._from:
                    xxhash.xxh3_64_intdigest(views[page])
                call(fd, [views[page]], page * size)  # type: ignore[operator]
                if self._hashed and views is self._into:
                    xxhash.xxh3_64_intdigest(views[page])

        begun = time.perf_counter()
        for pages in batches:
            if self._threads == 1:
                move(pages)
            else:
                list(self._workers.map(move, [pages[::2], pages[1::2]]))
        if self._synced and call is os.pwritev:
            os.fsync(fd)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Close the files."""
        self._workers.shutdown()
        for fd in self._fds:
            os.close(fd)


class FilePerPage:
    """One file per page, written aside and renamed; nothing is verified."""

    def __init__(self, root: Path, pool: Pool) -> None:
        root.mkdir()
        self._root = root
        self._pool = pool
        self._from = [memoryview(row) for row in pool.source]
        self._into = [memoryview(row) for row in pool.target]
        self._names = [str(root / f"{page:064x}") for page in range(len(self._from))]

    def put(self, batches: Rows, turn: int) -> float:
        """Write each page aside and rename it over the last one."""
        del turn
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        begun = time.perf_counter()
        for pages in batches:
            for page in pages:
                name = self._names[page]
                fd = os.open(name + ".tmp", flags, 0o600)
                os.write(fd, self._from[page])
                os.close(fd)
                os.rename(name + ".tmp", name)  # noqa: PTH104 - a Path costs more
        return time.perf_counter() - begun

    def get(self, batches: Rows, turn: int) -> float:
        """Open and read each page."""
        del turn
        begun = time.perf_counter()
        for pages in batches:
            for page in pages:
                fd = os.open(self._names[page], os.O_RDONLY)
                os.readv(fd, [self._into[page]])
                os.close(fd)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Nothing is held."""


def sync_files(root: Path) -> None:
    """Bring the pages of all segments to the disk."""
    for file in root.rglob("*.dat"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Kvdock:
    """The file backend, through its hooks, checksums on.

    Args:
        root: An empty folder.
        pool: The memory.
        synced: Whether a put ends once its pages are on the disk.
        settings: More settings of the backend.
    """

    def __init__(
        self, root: Path, pool: Pool, *, synced: bool = False, **settings: object
    ) -> None:
        self._root = root if synced else None
        self._pool = pool
        self.pages = len(pool.source)
        part = Part("kv", DType.U8, (pool.page_bytes,))
        spec = PoolSpec(
            name="kv",
            kind=PoolKind.MLA,
            parts=(part,),
            layers=(0,),
            page_tokens=1,
            anchor=True,
        )
        self.region = Region.of(spec, Shard(), [pool.target], len(pool.target))
        self._backend = Dock.load(require=["file"]).backends["file"]
        quota = max(QUOTA_BYTES, int(pool.source.nbytes * 1.5))
        given = {"root": str(root), "quota": quota, "free_space": 0} | settings
        self.namespace = "be" * 32
        config = AttachConfig(
            settings=self._backend.settings(given), namespace=self.namespace
        )
        self.handle: Any = self._backend.register_pool(spec, self.region, config)
        self._fill()

    def _fill(self) -> None:
        """Bring the store to where it recycles: no extent is fresh any more."""
        every = range(self.pages)
        batches = [list(every[at : at + 128]) for at in range(0, self.pages, 128)]
        turn = 10**6
        while not self.handle.usage().counts.get("segments_recycled"):
            self.put(batches, turn)
            turn += 1

    def keys(self, pages: list[int], turn: int) -> list[str]:
        """Return the keys of pages as one turn stores them."""
        head = f"{self.namespace}/{turn:032x}"
        return [f"{head}{page:032x}.kv.L0-1" for page in pages]

    def put(self, batches: Rows, turn: int) -> float:
        """Store each page under a new key; old ones make way.

        Like an engine it first asks whether they are there, outside the measured
        time. Without a lookup, all turns would be one prefix, and what does not fit
        of a prefix is REFUSED.
        """
        for pages in batches:
            self._backend.batch_io(
                self.handle, Batch(Operation.EXISTS, self.keys(pages, turn))
            )
        return self._timed(Operation.PUT, batches, turn, self._pool.source)

    def get(self, batches: Rows, turn: int) -> float:
        """Load each page and verify it."""
        return self._timed(Operation.GET, batches, turn, self._pool.target)

    def exists(self, count: int, turn: int) -> float:
        """Ask for pages of one turn; return the seconds."""
        keys = self.keys(list(range(count)), turn)
        begun = time.perf_counter()
        self._backend.batch_io(self.handle, Batch(Operation.EXISTS, keys))
        return time.perf_counter() - begun

    def _timed(
        self,
        operation: Operation,
        batches: Rows,
        turn: int,
        memory: npt.NDArray[np.uint8],
    ) -> float:
        size = self._pool.page_bytes
        calls = []
        for pages in batches:
            at = memory.ctypes.data + np.array(pages).reshape(-1, 1) * size
            sizes = np.broadcast_to(np.int64(size), at.shape)
            calls.append((self.keys(pages, turn), at, sizes))
        missed = 0
        begun = time.perf_counter()
        for keys, at, sizes in calls:
            batch = Batch(operation, keys, at, sizes)
            missed += int((~self._backend.batch_io(self.handle, batch).ok).sum())
        if self._root is not None and operation is Operation.PUT:
            sync_files(self._root)
        took = time.perf_counter() - begun
        if missed:
            raise RuntimeError(f"{operation}: {missed} pages were not OK")
        return took

    def close(self) -> None:
        """Release the handle."""
        self.handle.close()


class HiCacheFile:
    """SGLang's own class, in an interpreter that has it.

    Args:
        root: An empty folder.
        pool: Only its shape is used: the class has a pool in its own process.
        python: The interpreter.
    """

    def __init__(self, root: Path, pool: Pool, python: str) -> None:
        self._root = root
        self.pages = len(pool.source)
        script = Path(__file__).with_name("hicache_process.py")
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask("open", str(root), *pool.source.shape)

    def put(self, batches: Rows, turn: int) -> float:
        """Store each page under a new key."""
        return self._ask("put", batches, turn)

    def get(self, batches: Rows, turn: int) -> float:
        """Load each page; nothing is verified."""
        return self._ask("get", batches, turn)

    def exists(self, count: int, turn: int) -> float:
        """Ask for keys that are there."""
        return self._ask("exists", count, turn)

    def _ask(self, *words: object) -> float:
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        assert self._process.stdout is not None  # noqa: S101 - same
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("HiCacheFile's process has ended")
        return float(json.loads(answer))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        shutil.rmtree(self._root, ignore_errors=True)
