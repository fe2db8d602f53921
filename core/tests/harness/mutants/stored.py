"""Mutants that keep, return or forget the wrong bytes."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time

import numpy as np
from reference import (
    CHECK_BYTES,
    FolderShelf,
    Handle,
    ShelfOracle,
    sealed,
)

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from mutants.mutant import FolderMutant, MemoryMutant, ungated


class TruncatedAccepted(MemoryMutant):
    """Takes an object that is too short."""

    image_of = "mooncake: success is `res > 0`, no size compare"
    caught_by = "test_an_object_shorter_than_the_memory_is_a_miss"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        outcome, data = super().get(handle, key, nbytes)
        if outcome is not Outcome.SHORT:
            return outcome, data
        data = (handle.shelf.read(key) or b"")[CHECK_BYTES:]
        return Outcome.OK, data.ljust(nbytes, b"\0")


class LongerAccepted(MemoryMutant):
    """Takes as much of an object as fits."""

    image_of = "W2: an object larger than the page is loaded cut, True"
    caught_by = "test_an_object_longer_than_the_memory_is_a_miss"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        outcome, data = super().get(handle, key, nbytes)
        if outcome is not Outcome.LONG:
            return outcome, data
        data = (handle.shelf.read(key) or b"")[CHECK_BYTES:]
        return Outcome.OK, data[:nbytes]


class PoisonObject(FolderMutant):
    """Raises for a whole batch on a short file, and never rewrites it."""

    image_of = "W3: a truncated object raises, exists, and is never rewritten"
    caught_by = "test_an_object_of_another_length_is_a_miss_and_heals"
    raises = "OSError"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        if blob is None:
            return Outcome.ABSENT, b""
        if len(blob) != CHECK_BYTES + nbytes:
            raise OSError("Short read")
        return Outcome.OK, blob[CHECK_BYTES:]


class NothingVerified(FolderMutant):
    """Declares integrity and checks nothing."""

    image_of = "a lying capability: no checksum anywhere in SGLang's backends"
    caught_by = "test_altered_bytes_are_a_miss_and_heal"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        if blob is None:
            return Outcome.ABSENT, b""
        if len(blob) != CHECK_BYTES + nbytes:
            handle.shelf.remove(key)
            return Outcome.CORRUPT, b""
        return Outcome.OK, blob[CHECK_BYTES:]


class _Remover(ShelfOracle):
    def poke(self, key: str, offset: int, data: bytes) -> None:
        del offset, data
        self.remove(key)


class OracleRemoves(NothingVerified):
    """Checks nothing, and brings an oracle that removes what it shall change."""

    image_of = "a corruption test that passes because the page is missing"
    caught_by = "test_the_oracle_changes_the_stored_bytes_and_nothing_else"
    oracle = _Remover


class ChecksumWithoutKey(FolderMutant):
    """Verifies bytes, but not whose they are."""

    image_of = "B5, B6: another key's bytes, whole and therefore True"
    caught_by = "test_altered_bytes_are_a_miss_and_heal"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if self.get(handle, key, len(data))[0] is not Outcome.OK:
            handle.shelf.write(key, sealed("", data))
        return Outcome.OK

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        if blob is None:
            return Outcome.ABSENT, b""
        data = blob[CHECK_BYTES:]
        if blob != sealed("", data) or len(data) != nbytes:
            handle.shelf.remove(key)
            return Outcome.CORRUPT, b""
        return Outcome.OK, data


class SuccessWithoutBytes(MemoryMutant):
    """Says OK and stores nothing, sometimes."""

    image_of = "SGLang's shm stub: set is True, exists is False"
    caught_by = "test_a_successful_put_can_be_found_and_loaded"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if int(key.partition(".")[0][-1], 16) % 2 == 0:
            return Outcome.OK
        return super().put(handle, key, data)


class FullDiskSwallowed(FolderMutant):
    """Says OK when the store was full."""

    image_of = "a full disk caught and logged, the page reported as stored"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        super().put(handle, key, data)
        return Outcome.OK


class EvictsWhatItMayNot(FolderMutant):
    """Declares that it never evicts, and makes room anyway."""

    image_of = "a lying capability: eviction NO, old pages dropped without an error"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def room(self, handle: Handle, nbytes: int) -> bool:
        while handle.quota_bytes and handle.shelf.used() + nbytes > handle.quota_bytes:
            handle.shelf.remove(handle.shelf.names()[0])
        return True


class RefusesWhenFull(MemoryMutant):
    """Declares that it makes room by itself, and takes nothing when full."""

    image_of = "a lying capability: eviction, until the first full disk"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def room(self, handle: Handle, nbytes: int) -> bool:
        return not handle.quota_bytes or (
            handle.shelf.used() + nbytes <= handle.quota_bytes
        )


class Overwrites(MemoryMutant):
    """Replaces the bytes of a key that is there."""

    image_of = "B2: a second writer's slot replaces the first one's"
    caught_by = "test_a_stored_key_keeps_its_bytes"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        handle.shelf.remove(key)
        return super().put(handle, key, data)


class DeleteForgetsNothing(MemoryMutant):
    """Says that a page is deleted."""

    image_of = "a delete that only marks, and a lookup that ignores the mark"
    caught_by = "test_a_deleted_page_is_gone_and_can_be_stored_again"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        if batch.operation is Operation.DELETE:
            return Outcome.OK
        return super().step(handle, batch, row)


class ClearTakesAll(MemoryMutant):
    """Clears the whole store for one namespace."""

    image_of = "W4: clear() deletes every file; mooncake's is remove_all()"
    caught_by = "test_clear_leaves_other_namespaces_alone"

    def clear(self, handle: Handle, prefix: str) -> Outcome:
        return super().clear(handle, prefix[:0])


class ClearTakesOnePool(MemoryMutant):
    """Clears the objects of the pool that was asked."""

    image_of = "W5: ownership decided by a suffix"
    caught_by = "test_clear_forgets_the_whole_namespace"

    def clear(self, handle: Handle, prefix: str) -> Outcome:
        for key in handle.shelf.names():
            if key.startswith(prefix) and ".mha" in key:
                handle.shelf.remove(key)
        return Outcome.OK


class HalfAPage(MemoryMutant):
    """Takes the size of a page's keys for that of keys and values."""

    image_of = "W6: side pools of hf3fs are sized K only, every set fails"
    caught_by = "test_pages_come_back_as_they_were_stored"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if ".swa" in key and len(data) > 100:
            return Outcome.REFUSED
        return super().put(handle, key, data)


class FirstSegmentOnly(MemoryMutant):
    """Declares objects of many pieces and moves the first."""

    image_of = "a lying capability: multi_buffer"
    caught_by = "test_objects_of_many_pieces_move_as_declared"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is Operation.GET and batch.sizes.shape[1:] > (1,):
            result = super().run(handle, batch)
            for row in np.flatnonzero(result.ok).tolist():
                first = (ungated(batch).take(row) or b"")[: int(batch.sizes[row, 0])]
                nbytes = int(batch.object_bytes[row])
                ungated(batch).land(row, (first * nbytes)[:nbytes])
            return result
        return super().run(handle, batch)


class RoundsUp(MemoryMutant):
    """Writes whole sectors into the engine's memory."""

    image_of = "nixl O_DIRECT slots: pages that are not a multiple of a sector"
    caught_by = "test_pages_of_odd_sizes_come_back"

    def move(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        outcome = super().move(handle, batch, row)
        if outcome is Outcome.OK and batch.operation is Operation.GET:
            size = int(batch.sizes[row, -1])
            at = int(batch.addresses[row, -1]) + size
            ctypes.memset(at, 0, -size % 64)
        return outcome


class ReadsMemoryLate(MemoryMutant):
    """Remembers addresses and copies when the next call comes."""

    image_of = "an asynchronous put that returns before it has read the page"
    caught_by = "test_pages_come_back_as_they_were_stored"

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Handle, Batch]] = []

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        while self.waiting:
            super().run(*self.waiting.pop(0))
        if batch.operation is Operation.PUT:
            self.waiting.append((handle, batch))
            return BatchResult.all(batch, Outcome.OK)
        return super().run(handle, batch)


class SlotReused(MemoryMutant):
    """Reads a slot that may be another key's by now."""

    image_of = "B5: get races eviction, other key's bytes, result True"
    caught_by = "test_a_page_that_is_forgotten_while_it_is_read_is_right_or_missing"

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[str, int] = {}
        self.free = list(range(64))
        self.data = [b""] * 64
        self.guard = threading.Lock()

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        del handle
        key = batch.keys[row]
        if batch.operation is Operation.GET:
            slot = self.slots.get(key)
            if slot is None:
                return Outcome.ABSENT
            found, until = self.data[slot], time.monotonic() + 0.02
            while self.data[slot] is found and time.monotonic() < until:
                time.sleep(0.0005)
            ungated(batch).land(row, self.data[slot])
            return Outcome.OK
        with self.guard:
            if batch.operation is Operation.DELETE and key in self.slots:
                self.free.insert(0, self.slots.pop(key))
            if batch.operation is Operation.PUT and key not in self.slots:
                if not self.free:
                    self.free.append(self.slots.pop(next(iter(self.slots))))
                self.slots[key] = self.free.pop(0)
                self.data[self.slots[key]] = ungated(batch).take(row) or b""
        return Outcome.OK


class EvictedSlotServed(SlotReused):
    """Evicts a page while it is being read, and reads on."""

    image_of = "hf3fs reserve may evict a page that is being read"
    caught_by = "test_a_page_that_is_evicted_while_it_is_read_is_right_or_missing"


class SharedScratch(MemoryMutant):
    """Bounces every thread's pages through one buffer."""

    image_of = "bounce buffers shared by the engine's four threads"
    caught_by = "test_threads_share_a_handle"

    def __init__(self) -> None:
        super().__init__()
        self.scratch = b""

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        outcome, self.scratch = super().get(handle, key, nbytes)
        time.sleep(0.0001)
        data = self.scratch
        return (outcome, data) if len(data) == nbytes else (Outcome.ABSENT, b"")


class _InPlaceShelf(FolderShelf):
    def write(self, key: str, blob: bytes) -> None:
        path = self.path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.with_suffix(".key").write_text(key)
        half = len(blob) // 2
        with path.open("wb", buffering=0) as file:
            # Room first, then the bytes: the length is right from the start.
            file.truncate(len(blob))
            file.write(blob[:half])
            time.sleep(0.002)
            file.write(blob[half:])


class TornWrite(NothingVerified):
    """Writes in place, visible while it is half done."""

    image_of = "nixl: O_CREAT and no rename, a partial write counts as stored"
    caught_by = "test_processes_that_store_the_same_pages_do_not_tear_them"

    folder = _InPlaceShelf


HEAD_BYTES = 4096

STRIDE_BYTES = 1024

SAMPLE_BYTES = 64

BLOCK_BYTES = 256

TAIL_BYTES = 8192


class _Sampling(FolderMutant):
    """Signs the key, the length and a sample of the bytes."""

    def _sample(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _signed(self, key: str, data: bytes) -> bytes:
        signed = f"{key} {len(data)} ".encode() + self._sample(data)
        return hashlib.blake2b(signed, digest_size=CHECK_BYTES).digest() + data

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        limit = self.manifest().max_object_bytes
        if 0 < limit < len(data):
            return Outcome.REFUSED
        with handle.lock:
            if self.get(handle, key, len(data))[0] is not Outcome.OK:
                handle.shelf.write(key, self._signed(key, data))
        return Outcome.OK

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        if blob is None:
            return Outcome.ABSENT, b""
        data = blob[CHECK_BYTES:]
        if blob != self._signed(key, data) or len(data) != nbytes:
            handle.shelf.remove(key)
            return Outcome.CORRUPT, b""
        return Outcome.OK, data


class HeadsHashed(_Sampling):
    """Verifies the first 4 KiB and the last byte of each object."""

    image_of = "a checksum over a header: everything behind it is trusted"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        return data[:HEAD_BYTES] + data[-1:]


class SomeOfEachHashed(_Sampling):
    """Verifies 64 bytes of each KiB."""

    image_of = "an integrity check made cheaper by sampling, certified and trusted"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        middle = len(data) // 2
        windows = [
            data[at : at + SAMPLE_BYTES] for at in range(0, len(data), STRIDE_BYTES)
        ]
        return b"".join([*windows, data[middle : middle + 1], data[-SAMPLE_BYTES:]])


class WholeBlocksHashed(_Sampling):
    """Verifies whole blocks and takes what is behind the last one for padding."""

    image_of = "a kernel that sums 16-byte lanes and leaves the rest of a page out"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        return data[: len(data) - len(data) % BLOCK_BYTES]


class SmallOnesHashed(_Sampling):
    """Verifies small objects, and of large ones both ends and the middle."""

    image_of = "a fast path for large objects that leaves the checksum out"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        if len(data) <= 2 * TAIL_BYTES:
            return data
        middle = len(data) // 2
        windows = data[:TAIL_BYTES], data[middle : middle + TAIL_BYTES]
        return b"".join(windows) + data[-TAIL_BYTES:]


class SumOfWords(_Sampling):
    """Adds up words of four bytes, so that what is moved within a page passes."""

    image_of = "an additive checksum: swapped blocks have the same sum"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        words = np.frombuffer(data.ljust(-(-len(data) // 4) * 4, b"\0"), np.uint32)
        return int(words.sum(dtype=np.uint64)).to_bytes(8, "little")


class FirstPartHashed(_Sampling):
    """Verifies the keys of a page and not the values behind them."""

    image_of = "one digest per tensor, and that of the second is never compared"
    caught_by = "test_damage_at_any_place_of_an_object_is_a_miss_and_heals"

    def _sample(self, data: bytes) -> bytes:
        return data[: len(data) * 9 // 14] + data[-1:]
