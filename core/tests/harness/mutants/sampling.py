"""Mutants whose integrity looks at some of the bytes."""

from __future__ import annotations

import hashlib

import numpy as np
from reference import CHECK_BYTES, Handle

from kvdock.batch import Outcome
from mutants.mutant import FolderMutant

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
