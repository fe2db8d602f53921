"""Objects of a namespace as records: read by `kvdock store copy`, and taken by it."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.retention import RetentionAnswer
from kvdock.stores import StoredPage
from kvdock_segments.format import key_digests, key_seed
from kvdock_segments.posix_io import PosixIOEngine
from kvdock_segments.store import SegmentStore
from kvdock_segments.verify import checksum
from kvdock_segments.walk import segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvdock.arrays import ByteArray
    from kvdock.retention import Retention
    from kvdock.stores import PoolSurvey
    from kvdock_segments.limits import StoreLocation
    from kvdock_segments.settings import SegmentSettings
    from kvdock_segments.walk import Location

_BATCH = 4096
_CALL_S = 60.0
"""Time for one object: a copy as a whole takes as long as there are objects."""


def stored_pages(
    root: Path, namespace: str, keys: Sequence[str] = (), *, expiring: bool = False
) -> Iterator[StoredPage]:
    """Yield the objects of a namespace; those that go meanwhile read as None.

    An object of one of the whole `keys` has its key. Those that expire are left out
    unless `expiring`.
    """
    digests = key_digests(keys, key_seed(namespace)) if keys else ()
    known = {one.tobytes(): key for one, key in zip(digests, keys, strict=True)}
    for segment in segments(root, namespace):
        for slot in np.flatnonzero(segment.live).tolist():
            spot = segment.location(slot)
            record = segment.contents.records[slot]
            if record["expire_at"] and not expiring:
                continue  # a copy would be served after its time
            digest = np.array([record["key_low"], record["key_high"]]).tobytes()
            yield StoredPage(
                key=known.get(digest, ""),
                digest=digest,
                pool=spot.pool,
                nbytes=spot.nbytes,
                tenant=int(record["tenant"]),
                used_ns=max(
                    int(record["stored_ns"]), int(segment.contents.used_ns[slot])
                ),
                read=lambda spot=spot: _read(spot),  # type: ignore[misc]
            )


def _read(spot: Location) -> bytes | None:
    """Return an object's bytes if they are those that were stored."""
    with suppress(OSError), spot.path.open("rb", 0) as file:
        data = os.pread(file.fileno(), spot.nbytes, spot.offset)
        return data if checksum(file.fileno(), spot) == spot.checksum else None
    return None


@attrs.frozen(eq=False)
class SegmentReceiver:
    """Takes objects of one namespace into a store, by the digests of their keys.

    Args:
        opened: Closes the stores of all pools.
    """

    place: StoreLocation
    settings: SegmentSettings | None
    opened: ExitStack
    _stores: dict[tuple[str, int], SegmentStore] = attrs.field(factory=dict)

    def has(self, page: StoredPage) -> bool:
        """Return whether an object is there."""
        return self._run(Operation.EXISTS, page, np.zeros((0,), np.uint8))

    def take(self, page: StoredPage, data: bytes) -> bool:
        """Store an object; return whether it can be read again, right."""
        memory = np.frombuffer(data, np.uint8).copy()
        if not self._run(Operation.PUT, page, memory):
            return False
        memory[:] = 0
        return self._run(Operation.GET, page, memory) and memory.tobytes() == data

    def retain(
        self, pages: Sequence[StoredPage], asked: Retention
    ) -> Mapping[RetentionAnswer, int]:
        """Promise stored objects, or let them expire; return the answers."""
        answers: Counter[RetentionAnswer] = Counter()
        for store, some in self._by_store(pages):
            ends = np.full(len(some), asked.expire_at) if asked.expire_at else None
            batch = Batch(
                Operation.RETAIN,
                some,
                deadline_s=time.monotonic() + _CALL_S,
                keep_until=asked.keep_until,
                expire_at=ends,
            )
            answers.update(map(_answer, store.run(batch).outcomes.tolist()))
        return answers

    def delete(self, pages: Sequence[StoredPage]) -> list[StoredPage]:
        """Overwrite objects; return those that stay: a process writes beside them."""
        gone: set[bytes] = set()
        for store, some in self._by_store(pages):
            erased = store.erase(some, time.monotonic() + _CALL_S).tolist()
            gone |= {
                bytes.fromhex(one) for one, ok in zip(some, erased, strict=True) if ok
            }
        return [page for page in pages if page.digest not in gone]

    def _by_store(
        self, pages: Sequence[StoredPage]
    ) -> Iterator[tuple[SegmentStore, list[str]]]:
        """Yield digests for one call each, with the store that has their objects."""
        by_store: dict[SegmentStore, dict[str, None]] = {}
        for page in pages:
            store = self._store_of(page.pool, page.nbytes)
            by_store.setdefault(store, {})[page.digest.hex()] = None
        for store, digests in by_store.items():
            names = [*digests]
            for start in range(0, len(names), _BATCH):
                yield store, names[start : start + _BATCH]

    def _run(self, operation: Operation, page: StoredPage, memory: ByteArray) -> bool:
        seed = key_seed(self.place.namespace)
        digest = page.digest or key_digests([page.key], seed)[0].tobytes()
        batch = Batch(
            operation,
            [digest.hex()],
            np.array([[memory.ctypes.data]]),
            np.array([[len(memory)]]),
            time.monotonic() + _CALL_S,
            page.pool,
            tenant=page.tenant,
        )
        store = self._store_of(page.pool, page.nbytes)
        return int(store.run(batch).outcomes[0]) == Outcome.OK

    def erase_expired(self, pools: Iterable[PoolSurvey]) -> None:
        """Overwrite objects whose time is over."""
        for one in pools:
            if one.expiring:
                self._store_of(one.pool, one.object_bytes).erase_expired()

    def _store_of(self, pool: str, nbytes: int) -> SegmentStore:
        kind = pool, nbytes
        if kind not in self._stores:
            place = attrs.evolve(self.place, pool=pool, object_bytes=[nbytes])
            store = SegmentStore(place, PosixIOEngine(), self.settings, shrinks=False)
            self._stores[kind] = self.opened.enter_context(store)
        return self._stores[kind]


def _answer(outcome: int) -> RetentionAnswer:
    known = {
        Outcome.OK: RetentionAnswer.ACCEPTED,
        Outcome.ABSENT: RetentionAnswer.ABSENT,
    }
    return known.get(Outcome(outcome), RetentionAnswer.CLIPPED)
