"""Pages of one pool, through a storage class."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.synchronization import remaining_s
from kvdock.throttled_log import ThrottledLog, describe_error
from kvdock_hicache.host_pages import (
    HEAD_BYTES,
    class_key,
    copy_in,
    copy_out,
    flat_bytes,
    head_of,
    judge_head,
    make_head,
)
from kvdock_hicache.storage import READS, WRITES, ClassStorage

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from kvdock import AttachConfig
    from kvdock_hicache.host_pages import Tensor

SHARED = "storage"
_DONE = (Operation.EXISTS, Operation.PUT, Operation.GET)


def open_store(config: AttachConfig) -> HiCacheStore:
    """Build the class's object, or share the one of this attachment."""
    storage = config.shared.get(SHARED)
    if storage is None:
        storage = config.shared[SHARED] = ClassStorage(config.settings)
    storage.users += 1
    return HiCacheStore(storage, config)


class HiCacheStore:
    """The store of one pool.

    Args:
        storage: The class's object.
        config: Where it is shared.
    """

    def __init__(self, storage: ClassStorage, config: AttachConfig) -> None:
        self._storage = storage
        self._shared = config.shared
        self._log = ThrottledLog()

    def run(self, batch: Batch) -> BatchResult:
        """Answer piece by piece; what is left at the deadline is TIMEOUT."""
        codes = [Outcome.TIMEOUT] * len(batch)
        if batch.operation not in _DONE:
            # A class has no way to delete one object, and clears everyone's.
            return BatchResult.all(batch, Outcome.REFUSED)
        for start, stop in self._pieces(batch):
            if time.monotonic() < batch.deadline_s:
                part = batch.part(start, stop)
                codes[start:stop] = self._piece(part)
        return BatchResult.of(batch, codes)

    def close(self) -> None:
        """End the use of the class's object; the last user closes it."""
        self._storage.users -= 1
        if not self._storage.users:
            self._shared.pop(SHARED, None)
            self._storage.close()

    def _pieces(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """Cut where sizes change, the class's memory is full, or it has its most."""
        sizes = batch.object_bytes.tolist()
        start = 0
        while start < len(sizes):
            frame = sizes[start] + HEAD_BYTES
            room = self._storage.pages.half_bytes // frame
            most = min(len(sizes), start + max(1, min(self._storage.batch_keys, room)))
            stop = start + 1
            while stop < most and sizes[stop] == sizes[start]:
                stop += 1
            yield start, stop
            start = stop

    def _piece(self, part: Batch) -> list[Outcome]:
        """Do a piece; where that raises, key by key."""
        names = [class_key(key) for key in part.keys]
        try:
            if part.operation is Operation.EXISTS:
                return self._find(part, names)
            if part.operation is Operation.PUT:
                return self._put(part, names)
            return self._get(part, names)
        except Exception as error:  # noqa: BLE001 - a stranger's class
            if len(part) == 1:
                what = f"{part.operation} of {self._storage.name} failed"
                kind = type(error).__name__
                self._log.warning(kind, f"{what}: {describe_error(error)}", error)
                return [Outcome.ERROR]
        found = [Outcome.TIMEOUT] * len(part)
        for row in range(len(part)):
            if time.monotonic() < part.deadline_s:
                found[row : row + 1] = self._piece(part.part(row, row + 1))
        return found

    def _find(self, part: Batch, names: Sequence[str]) -> list[Outcome]:
        with _held(self._storage.asking, part) as held:
            if not held:
                return [Outcome.TIMEOUT] * len(part)
            there = self._storage.present(names)
        return [Outcome.OK if one else Outcome.ABSENT for one in there]

    def _put(self, part: Batch, names: Sequence[str]) -> list[Outcome]:
        """Store what is not there: a key keeps its bytes, and a class may replace."""
        found = self._find(part, names)
        wanted = [row for row, one in enumerate(found) if one is Outcome.ABSENT]
        nbytes = int(part.object_bytes[0])
        # A key may stand twice in a batch; a class has no word on that.
        rows = {names[row]: row for row in reversed(wanted)}
        if not rows:
            return found
        if not self._storage.fits(len(rows), nbytes + HEAD_BYTES):
            return [
                Outcome.REFUSED if row in wanted else found[row]
                for row in range(len(part))
            ]
        with _held(self._storage.writing, part) as held:
            frames = (
                self._storage.pages.lay(WRITES, len(rows), nbytes + HEAD_BYTES)
                if held
                else None
            )
            if frames is None or not _fill(part, rows, frames, nbytes):
                return [Outcome.TIMEOUT] * len(part)
            stored = dict(
                zip(rows, self._storage.write(list(rows), frames), strict=True)
            )
        for row in wanted:
            found[row] = Outcome.OK if stored[names[row]] else Outcome.REFUSED
        return found

    def _get(self, part: Batch, names: Sequence[str]) -> list[Outcome]:
        """Load what is there; a class that is asked for more may raise, or log."""
        found = self._find(part, names)
        rows = [row for row, one in enumerate(found) if one is Outcome.OK]
        nbytes = int(part.object_bytes[0])
        if not rows:
            return found
        if not self._storage.fits(len(rows), nbytes + HEAD_BYTES):
            return [Outcome.REFUSED] * len(part)
        with _held(self._storage.reading, part) as held:
            if not held:
                return [Outcome.TIMEOUT] * len(part)
            frames = self._storage.pages.lay(READS, len(rows), nbytes + HEAD_BYTES)
            answers = self._storage.read([names[row] for row in rows], frames)
            with _memory(part) as open_:
                for row, answer in zip(rows, answers, strict=True):
                    found[row] = Outcome.TIMEOUT
                    if open_:
                        found[row] = _land(part, row, names[row], answer)
        return found


def _fill(part: Batch, rows: dict[str, int], frames: Tensor, nbytes: int) -> bool:
    """Copy objects into frames; False where the memory has another use by now."""
    with _memory(part) as open_:
        if open_:
            for frame, (name, row) in zip(frames, rows.items(), strict=True):
                copy_in(frame, make_head(name, nbytes), _memory_of(part, row))
    return open_


def _land(part: Batch, row: int, name: str, answer: Tensor | None) -> Outcome:
    """Copy a frame to its memory, if it is the one that was asked for."""
    if answer is None:
        return Outcome.ABSENT
    frame = flat_bytes(answer)
    nbytes = int(part.object_bytes[row])
    if frame.numel() < HEAD_BYTES:
        return Outcome.SHORT
    outcome = judge_head(head_of(frame), name, nbytes)
    if outcome is Outcome.OK and frame.numel() != nbytes + HEAD_BYTES:
        short = frame.numel() < nbytes + HEAD_BYTES
        return Outcome.SHORT if short else Outcome.LONG
    if outcome is Outcome.OK:
        copy_out(frame, _memory_of(part, row))
    return outcome


def _memory_of(part: Batch, row: int) -> list[tuple[int, int]]:
    pieces = zip(part.addresses[row].tolist(), part.sizes[row].tolist(), strict=True)
    return [(at, nbytes) for at, nbytes in pieces if nbytes]


@contextlib.contextmanager
def _memory(part: Batch) -> Iterator[bool]:
    """Touch the batch's memory inside, if it may still be touched."""
    gate = part.gate
    entered = gate is None or gate.enter()
    try:
        yield entered
    finally:
        if entered and gate is not None:
            gate.leave()


@contextlib.contextmanager
def _held(lock: threading.Lock, part: Batch) -> Iterator[bool]:
    """Hold a lock inside, if it is free before the deadline."""
    held = lock.acquire(timeout=remaining_s(part.deadline_s))
    try:
        yield held
    finally:
        if held:
            lock.release()
