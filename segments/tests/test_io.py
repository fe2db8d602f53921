"""An I/O engine with tokens, slots and registered memory of its own."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvdock.batch import Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.geometry.address_ranges import AddressRanges
from kvdock_segments import (
    UNREGISTERED,
    IOEngine,
    IORequest,
    IOResult,
    PosixIOEngine,
)
from kvdock_segments.io import preallocate_file

OpenDepot = Callable[..., Any]
CHUNK = 24 << 10
"""Not a power of two: no other way of rounding yields it by chance."""


@attrs.frozen(eq=False)
class Handle:
    """A token that is not a descriptor."""

    name: str
    fd: int


class ChunkEngine(IOEngine):
    """Moves whole chunks between files that it numbers and memory that it knows."""

    def __init__(self) -> None:
        self.known = AddressRanges.of([(0, 2**47)])
        self.made: list[tuple[str, int]] = []
        self._inner = PosixIOEngine(2)

    def slot_bytes(self, object_bytes: int) -> int:
        return -(-object_bytes // CHUNK) * CHUNK

    def open_file(self, name: str, folder: int, *, create: bool) -> Handle:
        return Handle(name, self._inner.open_file(name, folder, create=create))

    def preallocate(self, token: Handle, nbytes: int) -> None:
        self.made.append((token.name, nbytes))
        preallocate_file(token.fd, nbytes)

    def close_file(self, token: Handle) -> None:
        self._inner.close_file(token.fd)

    def move(self, transfer: IORequest) -> IOResult:
        assert not (transfer.offsets % CHUNK).any()
        known = self.known.covered_rows(transfer.addresses, transfer.sizes)
        rows = np.flatnonzero(known)
        done = self._inner.move(
            attrs.evolve(
                transfer,
                files=tuple(token.fd for token in transfer.files),
                file_of=transfer.file_of[rows],
                offsets=transfer.offsets[rows],
                addresses=transfer.addresses[rows],
                sizes=transfer.sizes[rows],
            )
        )
        moved = IOResult.of(len(transfer))
        moved.errors[:] = UNREGISTERED
        moved.errors[rows] = done.errors
        moved.nbytes[rows] = done.nbytes
        moved.checksums[rows] = done.checksums
        return moved

    def close(self) -> None:
        self._inner.close()


def outcomes(depot: Any, operation: Operation, pages: Any, numbers: Any) -> list[int]:
    result = depot.store.run(depot.batch(operation, numbers, pages))
    return [int(one) for one in result.outcomes]


def strides(depot: Any, numbers: Sequence[int]) -> set[int]:
    return {depot.where(number).slot_bytes for number in numbers}


def test_pages_come_back_through_tokens_that_are_not_descriptors(
    open_depot: OpenDepot,
) -> None:
    engine = ChunkEngine()
    depot = open_depot(engine=engine)
    assert depot.put(range(40)).ok.all()
    assert depot.get(range(40)) == [Outcome.OK] * 40
    assert engine.made
    sizes = {path.name: path.stat().st_size for path in depot.root.rglob("*.dat")}
    assert sizes == dict(engine.made)


def test_the_engine_sizes_the_slots(open_depot: OpenDepot) -> None:
    depot = open_depot(engine=ChunkEngine())
    depot.put(range(4))
    assert strides(depot, range(4)) == {CHUNK}
    large = open_depot(engine=ChunkEngine(), page_bytes=CHUNK + 8)
    large.put(range(4, 8))
    assert strides(large, range(4, 8)) == {2 * CHUNK}


def test_pages_make_way_within_a_quota_of_chunks(open_depot: OpenDepot) -> None:
    quota = 48 * CHUNK
    depot = open_depot(engine=ChunkEngine(), quota=quota)
    for start in range(0, 200, 10):
        assert depot.request(range(start, start + 10)).ok.all()
        assert depot.store.usage().namespace_bytes <= quota
    assert depot.store.counts["segments_recycled"]
    assert depot.get(range(190, 200)) == [Outcome.OK] * 10


def test_an_engine_writes_no_slots_that_it_did_not_size(open_depot: OpenDepot) -> None:
    plain = open_depot()
    plain.put([0])
    plain.store.close()
    chunked = open_depot(engine=ChunkEngine())
    assert chunked.put([1]).ok.all()
    assert strides(chunked, [0]) == {8192}
    assert strides(chunked, [1]) == {CHUNK}
    chunked.store.close()
    # A chunk is a slot for an engine that asks for blocks.
    plain = open_depot()
    plain.delete([0])
    for path in plain.root.rglob("*.dat"):
        if path.name != plain.where(1).path.name:
            path.unlink()
    assert plain.put([2]).ok.all()
    assert strides(plain, [2]) == {CHUNK}


def test_a_file_that_was_cut_is_made_whole_by_the_engine(open_depot: OpenDepot) -> None:
    writer = open_depot()
    writer.put(range(3))
    path = writer.where(0).path
    whole = path.stat().st_size
    writer.store.close()
    os.truncate(path, 8192)

    class Restoring(ChunkEngine):
        def slot_bytes(self, object_bytes: int) -> int:
            return -(-object_bytes // 4096) * 4096

        def move(self, transfer: IORequest) -> IOResult:
            files = tuple(token.fd for token in transfer.files)
            return self._inner.move(attrs.evolve(transfer, files=files))

    engine = Restoring()
    depot = open_depot(engine=engine)
    assert depot.put(range(5)).ok.all()
    assert engine.made == [(path.name, whole)]
    assert depot.get(range(5)) == [Outcome.OK] * 5


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.GET])
def test_memory_that_is_not_registered_is_refused_and_nothing_else(
    open_depot: OpenDepot, operation: Operation
) -> None:
    engine = ChunkEngine()
    depot = open_depot(engine=engine)
    pages = depot.pages(range(6))
    if operation is Operation.GET:
        depot.put(range(6))
    at, row_bytes = int(pages.ctypes.data), pages.shape[1]
    engine.known = AddressRanges.of([(at, 2 * row_bytes), (at + 3 * row_bytes, 9999)])
    wanted = [Outcome.OK] * 2 + [Outcome.REFUSED, Outcome.OK] + [Outcome.REFUSED] * 2
    assert outcomes(depot, operation, pages, range(6)) == wanted
    # It is a mistake of the caller, so no page is dropped.
    engine.known = AddressRanges.of([(0, 2**47)])
    stored = [n for n in range(6) if wanted[n] == Outcome.OK]
    if operation is Operation.GET:
        stored = list(range(6))
    assert depot.there(range(6)) == [n in stored for n in range(6)]
    assert depot.get(stored) == [Outcome.OK] * len(stored)


def test_an_address_that_the_kernel_does_not_know_is_refused_too(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(2))
    batch = depot.batch(Operation.GET, range(2), depot.pages(range(2)))
    nowhere = np.array([[4096], [8192]])
    result = depot.store.run(attrs.evolve(batch, addresses=nowhere))
    assert result.outcomes.tolist() == [Outcome.REFUSED] * 2
    assert depot.get(range(2)) == [Outcome.OK] * 2


@pytest.mark.parametrize("slot_bytes", [4096, 8200])
def test_an_engine_whose_slots_fit_no_object_is_rejected(
    open_depot: OpenDepot, slot_bytes: int
) -> None:
    class Wrong(ChunkEngine):
        def slot_bytes(self, object_bytes: int) -> int:
            return slot_bytes if object_bytes == 8192 else object_bytes + 1

    with pytest.raises(KvdockError, match="slots of"):
        open_depot(engine=Wrong())
