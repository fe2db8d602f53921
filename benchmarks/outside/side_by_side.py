"""Stores that people have at hand beside kvdock's file backend.

Pages of 64K, 256K and 1M in batches of 1, 16 and 128. In each turn every store loads
pages that it does not have, stores them, stores them once more and loads them, in an
order that moves on with the turns; the first turn only warms up. Memory is touched
before. What is loaded is compared with what was stored. Figures are the medians over
turns of a store's seconds over kvdock's in the same turn, of the wall and of processor
time (all threads, system calls included, and what a store does afterwards).
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from plain_stores import FilePerPage, Lmdb, RocksDb, Rows, Sqlite, Store

from kvdock_store import Kvdock, KvdockBackend

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20}
BATCHES = (1, 16, 128)
FOOTPRINT_BYTES = 128 << 20
CALLS = 256
"""Most calls of a turn; with batches of one page it moves less than the footprint."""
QUOTA_BYTES = 2 << 30
"""Of kvdock's store. It is filled first: then what is stored makes others go."""
OPERATIONS = ("get_unknown", "put_new", "put_known", "get_known")
KVDOCK = "kvdock"

Figures = dict[str, dict[str, dict[str, dict[str, float]]]]
"""Operation, store, pages and batch ("64K x 16"), then `wall` and `processor`."""
Taken = dict[str, dict[str, list[tuple[float, float]]]]
"""Operation, store, then seconds of each turn."""


def opened(
    folder: Path, memory: Rows, quota_bytes: int, names: Sequence[str] = ()
) -> dict[str, Store]:
    """Open stores, or all of them, each on an empty folder of its own."""
    makers: dict[str, Callable[[Path], Store]] = {
        KVDOCK: lambda root: Kvdock(root, memory, quota_bytes),
        "kvdock_backend": lambda root: KvdockBackend(root, memory, quota_bytes),
        "file": lambda root: FilePerPage(root, memory),
        "file_checked": lambda root: FilePerPage(root, memory, checked=True),
        "sqlite": lambda root: Sqlite(root, memory),
        "lmdb": lambda root: Lmdb(root, memory),
        "rocksdb": lambda root: RocksDb(root, memory),
    }
    stores = {}
    for name in names or makers:
        (folder / name).mkdir(mode=0o700)
        stores[name] = makers[name](folder / name)
    return stores


def made_memory(pages: int, page_bytes: int) -> Rows:
    """Return rows to store from, random, and as many to load into, all touched."""
    memory = np.ones((2 * pages, page_bytes), np.uint8)
    random = np.random.default_rng(7)
    memory[:pages] = random.integers(0, 256, (pages, page_bytes), np.uint8)
    return memory


class Race:
    """Stores that take turns with the same pages.

    Args:
        stores: They, by name.
        memory: Twice the pages of a turn: what is stored, and where it is loaded to.
    """

    def __init__(self, stores: dict[str, Store], memory: Rows) -> None:
        self._stores = stores
        self._memory = memory
        self._pages = len(memory) // 2
        self._turn = 0

    def pages_of(self, batch: int) -> int:
        """Return how many pages a turn moves."""
        return min(self._pages, CALLS * batch)

    def _batches(self, batch: int, first: int) -> Iterator[tuple[list[str], range]]:
        """Yield the keys of a turn, and rows from `first` on."""
        for start in range(0, self.pages_of(batch), batch):
            pages = range(start, start + batch)
            keys = [hashlib.sha256(b"%d %d" % (self._turn, one)) for one in pages]
            yield (
                [key.hexdigest() for key in keys],
                range(first + start, first + start + batch),
            )

    def fill(self, store: Store, quota_bytes: int) -> None:
        """Store so much that everything further makes something go."""
        for _ in range(1 + quota_bytes // self._memory[: self._pages].nbytes):
            self._turn += 1
            for keys, rows in list(self._batches(min(128, self._pages), 0)):
                store.look_up(keys)
                store.put(keys, rows)

    def run(self, batch: int, turns: int) -> Taken:
        """Return the seconds of every turn but the first."""
        taken: Taken = {one: {name: [] for name in self._stores} for one in OPERATIONS}
        names = list(self._stores)
        for number in range(turns + 1):
            self._turn += 1
            for operation in OPERATIONS:
                for name in names:
                    took = self._timed(name, operation, batch)
                    if number:
                        taken[operation][name].append(took)
            for name in names:
                for keys, _ in self._batches(batch, 0):
                    self._stores[name].drop(keys)
            names = [*names[1:], names[0]]
        return taken

    def _timed(self, name: str, operation: str, batch: int) -> tuple[float, float]:
        store, loads = self._stores[name], operation.startswith("get")
        calls = list(self._batches(batch, self._pages if loads else 0))
        if operation == "get_known":
            self._memory[self._pages :] = 0
        for keys, _ in calls if operation == "put_new" else ():
            store.look_up(keys)
        found = 0
        wall_s, processor_s = time.perf_counter(), time.process_time()
        for keys, rows in calls:
            if loads:
                found += store.get(keys, rows)
            else:
                store.put(keys, rows)
        wall_s = time.perf_counter() - wall_s
        store.settle()
        processor_s = time.process_time() - processor_s
        self._check(name, operation, found, self.pages_of(batch))
        return wall_s, processor_s

    def _check(self, name: str, operation: str, found: int, pages: int) -> None:
        """Compare what was found with what was stored."""
        expected = pages if operation == "get_known" else 0
        if found != expected:
            raise SystemExit(f"{name}: {operation} found {found} of {expected} pages")
        stored, loaded = np.split(self._memory, 2)
        if not np.array_equal(stored[:expected], loaded[:expected]):
            raise SystemExit(f"{name}: wrong bytes")


def measure(folder: Path, turns: int, *, small: bool = False) -> dict[str, object]:
    """Race all stores with all sizes and batches; return the figures.

    Args:
        folder: Where the stores are.
        turns: Turns that count.
        small: Whether pages of one size, few of them, are enough.
    """
    ratios: Figures = {}
    kvdock: dict[str, dict[str, float]] = {}
    footprint = FOOTPRINT_BYTES >> 3 if small else FOOTPRINT_BYTES
    quota_bytes = QUOTA_BYTES >> 3 if small else QUOTA_BYTES
    for size, page_bytes in list(SIZES.items())[: 1 if small else None]:
        root = folder / size
        root.mkdir()
        memory = made_memory(footprint // page_bytes, page_bytes)
        stores = opened(root, memory, quota_bytes)
        race = Race(stores, memory)
        try:
            for name in (KVDOCK, "kvdock_backend"):
                race.fill(stores[name], quota_bytes)
            for batch in BATCHES:
                where = f"{size} x {batch}"
                taken = race.run(batch, turns)
                nbytes = race.pages_of(batch) * page_bytes
                _add(ratios, kvdock, where, taken, nbytes)
                _show(where, taken, nbytes)
        finally:
            for store in stores.values():
                store.close()
            shutil.rmtree(root, ignore_errors=True)
    return {"kvdock_gb_s": kvdock, "seconds_over_kvdock": ratios}


def _medians(taken: Taken, operation: str, name: str) -> list[float]:
    """Return the median ratios to kvdock in a turn: of wall and processor time."""
    pairs = zip(taken[operation][name], taken[operation][KVDOCK], strict=True)
    ratios = [
        [theirs / max(ours, 1e-9) for theirs, ours in zip(*pair, strict=True)]
        for pair in pairs
    ]
    return [statistics.median(column) for column in zip(*ratios, strict=True)]


def _add(
    ratios: Figures,
    kvdock: dict[str, dict[str, float]],
    where: str,
    taken: Taken,
    nbytes: int,
) -> None:
    for operation, stores in taken.items():
        wall_s = statistics.median(wall for wall, _ in stores[KVDOCK])
        if operation in {"put_new", "get_known"}:
            kvdock.setdefault(operation, {})[where] = round(nbytes / wall_s / 1e9, 2)
        for name in stores:
            if name != KVDOCK:
                wall, processor = _medians(taken, operation, name)
                one = {"wall": round(wall, 2), "processor": round(processor, 2)}
                ratios.setdefault(operation, {}).setdefault(name, {})[where] = one


def _show(where: str, taken: Taken, nbytes: int) -> None:
    print(f"\n{where}: GB/s, and seconds over kvdock's (wall, processor)")
    for operation, stores in taken.items():
        cells = []
        for name, seconds in stores.items():
            speed = nbytes / statistics.median(wall for wall, _ in seconds) / 1e9
            wall, processor = _medians(taken, operation, name)
            cells.append(f"{name} {speed:.2f} ({wall:.2f}, {processor:.2f})")
        print(f"  {operation:12}" + "  ".join(cells), flush=True)
