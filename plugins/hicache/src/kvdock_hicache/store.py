"""Pages of one pool, through a storage class."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
import time
from typing import TYPE_CHECKING

from kvdock import Batch, BatchResult, Operation, Outcome
from kvdock.throttled_log import ThrottledLog, describe_error
from kvdock_hicache.host_pages import HEAD_BYTES, make_head
from kvdock_hicache.storage import ClassStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock import AttachConfig
    from kvdock_hicache.host_pages import Tensor

_SHARED = "storage"


class HiCacheStore:
    """The store of one pool; all pools of an attachment share the class's object."""

    def __init__(self, config: AttachConfig) -> None:
        self._shared = config.shared
        if _SHARED not in config.shared:
            config.shared[_SHARED] = ClassStorage(config.settings)
        self._storage: ClassStorage = config.shared[_SHARED]
        self._storage.users += 1
        self._most_keys: int = config.settings.batch_keys
        self._log = ThrottledLog()

    def close(self) -> None:
        """End the use of the class's object; the last user closes it."""
        self._storage.users -= 1
        if not self._storage.users:
            self._shared.pop(_SHARED, None)
            self._storage.close()

    def run(self, batch: Batch) -> BatchResult:
        """Look up or move piece by piece; what is left at the deadline is TIMEOUT."""
        codes: list[Outcome] = []
        for part in self._parts(batch):
            codes += self._part(part)
        return BatchResult.of(batch, codes)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Cut where sizes change, the memory is full, or a call has its most keys."""
        sizes = batch.object_bytes.tolist()
        start = 0
        while start < len(sizes):
            room = self._storage.pages.half_bytes // (sizes[start] + HEAD_BYTES)
            stop, end = start + 1, start + min(self._most_keys, max(room, 1))
            while stop < min(end, len(sizes)) and sizes[stop] == sizes[start]:
                stop += 1
            yield batch.part(start, stop)
            start = stop

    def _part(self, part: Batch) -> list[Outcome]:
        """Do a part; where that raises, key by key: one file may spoil the others."""
        if time.monotonic() >= part.deadline_s:
            return [Outcome.TIMEOUT] * len(part)
        try:
            return self._move(part)
        except TimeoutError:
            return [Outcome.TIMEOUT] * len(part)
        except Exception as error:  # noqa: BLE001 - a stranger's class
            if len(part) > 1:
                return [self._part(part.part(at, at + 1))[0] for at in range(len(part))]
            what = f"{part.operation} of {self._storage.name} failed"
            kind = type(error).__name__
            self._log.warning(kind, f"{what}: {describe_error(error)}", error)
            return [Outcome.ERROR]

    def _move(self, part: Batch) -> list[Outcome]:
        """Ask which keys are there, and move those that are to be moved.

        A key that is there keeps its bytes, and a class may replace them; a class that
        is asked for what is not there may raise.
        """
        # SGLang's own keys look like this: no class has trouble with them.
        names = [hashlib.sha256(key.encode()).hexdigest() for key in part.keys]
        with _held(self._storage.asking, part):
            there = self._storage.present(names)
        found = [Outcome.OK if one else Outcome.ABSENT for one in there]
        put = part.operation is Operation.PUT
        moved = [row for row, one in enumerate(there) if one is not put]
        if not moved or part.operation is Operation.EXISTS:
            return found
        row_bytes = int(part.object_bytes[0]) + HEAD_BYTES
        if self._storage.by_index and row_bytes > self._storage.pages.half_bytes:
            return [Outcome.REFUSED] * len(part)
        move = self._put if put else self._get
        lock = self._storage.writing if put else self._storage.reading
        # A class has no word on a key that stands twice in a call.
        rows: dict[str, list[int]] = {}
        for row in moved:
            rows.setdefault(names[row], []).append(row)
        with _held(lock, part):
            laid = self._storage.pages.lay(int(put), len(rows), row_bytes)
            done = move(part, rows, *laid)
        for own, outcome in zip(rows.values(), done, strict=True):
            for row in own:
                found[row] = outcome
        return found

    def _put(
        self, part: Batch, rows: dict[str, list[int]], frames: Tensor, indices: Tensor
    ) -> list[Outcome]:
        """Copy objects with their heads, and store the copies."""
        nbytes = frames.shape[1] - HEAD_BYTES
        with _memory(part):
            for frame, (name, own) in zip(frames, rows.items(), strict=True):
                at = frame.data_ptr()
                ctypes.memmove(at, make_head(name, nbytes), HEAD_BYTES)
                for start, address, size in _pieces(part, own[0]):
                    ctypes.memmove(at + HEAD_BYTES + start, address, size)
        stored = self._storage.write(list(rows), frames, indices)
        return [Outcome.OK if one else Outcome.REFUSED for one in stored]

    def _get(
        self, part: Batch, rows: dict[str, list[int]], frames: Tensor, indices: Tensor
    ) -> list[Outcome]:
        """Load copies, and copy out those that are what was asked for."""
        answers = self._storage.read(list(rows), frames, indices)
        with _memory(part):
            return [
                _land(part, own, name, answer, frames.shape[1])
                for (name, own), answer in zip(rows.items(), answers, strict=True)
            ]


def _land(
    part: Batch, own: list[int], name: str, answer: Tensor | None, row_bytes: int
) -> Outcome:
    if answer is None:
        return Outcome.ABSENT
    found = answer.nbytes
    if found != row_bytes:
        return Outcome.SHORT if found < row_bytes else Outcome.LONG
    # A class may answer with a tensor of its own, in another form.
    frame = answer.contiguous()
    at = frame.data_ptr()
    if ctypes.string_at(at, HEAD_BYTES) != make_head(name, found - HEAD_BYTES):
        return Outcome.CORRUPT
    for row in own:
        for start, address, size in _pieces(part, row):
            ctypes.memmove(address, at + HEAD_BYTES + start, size)
    return Outcome.OK


def _pieces(part: Batch, row: int) -> Iterator[tuple[int, int, int]]:
    """Yield offset in the object, address and size of each piece of memory."""
    start = 0
    sizes = part.sizes[row].tolist()
    for address, size in zip(part.addresses[row].tolist(), sizes, strict=True):
        yield start, address, size
        start += size


@contextlib.contextmanager
def _memory(part: Batch) -> Iterator[None]:
    """Touch the engine's memory inside; a TimeoutError if it has another use."""
    if part.gate is not None and not part.gate.enter():
        raise TimeoutError
    try:
        yield
    finally:
        if part.gate is not None:
            part.gate.leave()


@contextlib.contextmanager
def _held(lock: threading.Lock, part: Batch) -> Iterator[None]:
    """Hold a lock inside; a TimeoutError if it is not free before the deadline."""
    if not lock.acquire(timeout=min(part.remaining_s(), threading.TIMEOUT_MAX)):
        raise TimeoutError
    try:
        yield
    finally:
        lock.release()
