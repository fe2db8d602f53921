"""A store with pages whose bytes follow from their number."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from kvdock import native
from kvdock.batch import Batch, BatchResult, Operation
from kvdock_segments import (
    IOEngine,
    PosixIOEngine,
    SegmentSettings,
    SegmentStore,
    StoreLocation,
    WriterLiveness,
    catalog,
    directory,
    settings,
)
from kvdock_segments.walk import Location, locate

PAGE_BYTES = 8192
OF_PLACE = {"record", "tenant", "tenants", "max_age_s", "erase_within_s"}
NAMESPACE = hashlib.sha256(b"{}").hexdigest()


@attrs.frozen(eq=False)
class Depot:
    """A store, and memory for its pages."""

    root: Path
    store: SegmentStore
    page_bytes: int = PAGE_BYTES

    def keys(self, numbers: Sequence[int]) -> list[str]:
        return [f"{self.store.place.namespace}/{n:032x}.kv" for n in numbers]

    def pages(self, numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
        words = np.arange(self.page_bytes // 8, dtype=np.uint64) * np.uint64(2**61 + 9)
        every = np.array(numbers, np.uint64)[:, None] + words
        return every.view(np.uint8)

    def batch(
        self,
        operation: Operation,
        numbers: Sequence[int],
        memory: npt.NDArray[np.uint8],
        **more: Any,
    ) -> Batch:
        at = memory.ctypes.data + np.arange(len(memory)) * memory.shape[1]
        # A view of one row, as regions give it.
        sizes = np.broadcast_to(np.int64(memory.shape[1]), (len(memory), 1))
        keys = self.keys(numbers)
        return Batch(operation, keys, at.reshape(-1, 1), sizes, **more)

    def put(self, numbers: Sequence[int], **more: Any) -> BatchResult:
        memory = self.pages(numbers)
        return self.store.run(self.batch(Operation.PUT, numbers, memory, **more))

    def request(self, numbers: Sequence[int]) -> BatchResult:
        """Store pages as engines do that look them up first."""
        self.there(numbers)
        return self.put(numbers)

    def restorable(self, numbers: Sequence[int]) -> int:
        """Return how many pages a prefix still has."""
        return [*self.there(numbers), False].index(False)

    def get(self, numbers: Sequence[int], **more: Any) -> list[int]:
        """Load pages; return their outcomes once what is OK is proven right."""
        memory = np.zeros((len(numbers), self.page_bytes), np.uint8)
        result = self.store.run(self.batch(Operation.GET, numbers, memory, **more))
        right = (memory == self.pages(numbers)).all(axis=1)
        assert right[result.ok].all(), "wrong bytes were served"
        return [int(outcome) for outcome in result.outcomes]

    def there(self, numbers: Sequence[int]) -> list[bool]:
        result = self.store.run(Batch(Operation.EXISTS, self.keys(numbers)))
        return [bool(ok) for ok in result.ok]

    def delete(self, numbers: Sequence[int]) -> None:
        self.store.run(Batch(Operation.DELETE, self.keys(numbers)))

    def clear(self) -> BatchResult:
        prefix = f"{self.store.place.namespace}/"
        return self.store.run(Batch(Operation.CLEAR, [prefix]))

    def where(self, number: int) -> Location:
        (found,) = locate(self.root, self.keys([number])[0])
        return found


OpenDepot = Callable[..., Depot]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes every file system one that cannot be written."""
    to_open = os.open

    def refuse(path: Any, flags: int, *more: Any, **words: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return to_open(path, flags, *more, **words)

    return lambda: monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def never_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no folder a second time, as for a moment after a refresh that took long."""
    monkeypatch.setattr(catalog, "_PATIENCE", 1e9)
    monkeypatch.setattr(catalog, "_LONGEST_S", 1e9)
    monkeypatch.setattr(directory, "_SCAN_AFTER_S", 1e9)


@pytest.fixture
def open_depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenDepot]:
    """Open a depot, on the same root by default."""
    opened: list[Depot] = []

    def open_one(
        root: Path | None = None,
        *,
        page_bytes: int = PAGE_BYTES,
        pool: str = "kv",
        namespace: str = NAMESPACE,
        direct: bool = False,
        engine: IOEngine | None = None,
        liveness: WriterLiveness = WriterLiveness.LOCKS,
        **limits: Any,
    ) -> Depot:
        monkeypatch.setattr(settings, "_LEAST_SEGMENT_BYTES", 0)
        root = root or tmp_path / "store"
        place = StoreLocation(
            root=root,
            namespace=namespace,
            pool=pool,
            object_bytes=(page_bytes,),
            liveness=liveness,
            **{name: limits.pop(name) for name in OF_PLACE & set(limits)},
        )
        limits = {"segment_bytes": 256 << 10, "free_space": 0} | limits
        moves = engine or PosixIOEngine(2, direct=direct)
        store = SegmentStore(place, moves, SegmentSettings(root=root, **limits))
        depot = Depot(root, store, page_bytes)
        opened.append(depot)
        return depot

    yield open_one
    for depot in opened:
        depot.store.close()


@pytest.fixture(params=["compiled", "python"], scope="module")
def each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hash and move pages in compiled code, and once more in Python."""
    if request.param == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            yield
    elif native.library() is None:
        pytest.skip("no C compiler was there when kvdock was installed")
    else:
        yield
