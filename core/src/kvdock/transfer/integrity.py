"""Trailers: verify that bytes are those that were stored under this key.

Each object is followed by a trailer: format, key digest, length, and a hash of
the bytes. It is written and read in the same call as one more piece of the
object, from memory of the core that the backend knows like a pool's own. The
page is hashed where it lies and never copied.

Format 2 has as many bytes, and room for a time to expire, a tenant and the id of a
key. It is read everywhere and written for objects that have one of these; all others
have format 1. Decision 126 shows the bytes of both.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np
import numpy.typing as npt
import xxhash

from kvdock.batch import Outcome
from kvdock.geometry.region import Block, Region
from kvdock.native import address_space, checksums
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.transfer.host_memory import Allocator, HostBuffer, allocate_host

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray, UInt64Array
    from kvdock.pools.objects import StoredObject

FORMAT = 1
"""Version of a trailer of an object that has neither expiry, tenant nor key; one
that this core does not know is a miss."""
DATED_FORMAT = 2
"""Version of a trailer of any other object."""

SLOT_BYTES = 64
"""Distance of trailers in memory: each has a cache line of its own."""

TRAILER: np.dtype[np.void] = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u4"),
        ("key", "S16"),
        ("nbytes", "<u8"),
        ("digest", "<u8"),
    ]
)
"""One trailer: 40 bytes, little-endian on every machine."""

DATED_TRAILER: np.dtype[np.void] = np.dtype(
    [
        ("magic", "S1"),
        ("format", "u1"),
        ("key_id", "<u2"),  # of the key that sealed the object; 0 for none
        ("tenant", "<u4"),  # 0 for none
        ("expire_at", "<u4"),  # seconds since 1970; 0 for never
        ("nbytes", "<u4"),
        ("key", "S16"),
        ("digest", "<u8"),
    ]
)
"""One trailer of format 2. In a sealed object, which has a key id, the last 28 bytes
from `nbytes` on are nonce (12) and tag (16) instead."""

_MAGIC = b"KVTR"
_DATED_MAGIC = b"K"
_FACTORS = np.array([0x9E6C63D0976B2D1B, 0xD1342543DE82EF95], np.uint64)
_PLAIN = struct.Struct("<4sI16sQQ")
"""The same as `TRAILER`."""
_FEW = 8
"""Pages whose trailers are compared one by one: 4 us for one, 24 us as arrays."""

Sealed = npt.NDArray[np.void]


def trailer_key_digests(keys: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """Return 128 bits of each key, bytes (n,).

    They find swapped and misplaced objects. An adversary who can write to the
    store can also forge a trailer, so they need not be cryptographic.
    """
    digests = map(xxhash.xxh3_128_digest, map(str.encode, keys))
    return np.frombuffer(b"".join(digests), "S16")


def make_trailers(
    keys: Sequence[str],
    nbytes: npt.ArrayLike,
    digests: UInt64Array,
    *,
    expire_at: int = 0,
) -> Sealed:
    """Return the trailers that belong to objects.

    Args:
        keys: The n keys.
        nbytes: int64 (n,) or one number, bytes of each object.
        digests: uint64 (n,), XXH3-64 of each object's bytes.
        expire_at: Seconds since 1970 from which on they are not served; with 0 the
            trailers have format 1.
    """
    if expire_at:
        return make_dated_trailers(keys, nbytes, digests, expire_at=expire_at)
    trailers = np.empty(len(keys), TRAILER)
    trailers["magic"] = _MAGIC
    trailers["format"] = FORMAT
    trailers["key"] = trailer_key_digests(keys)
    trailers["nbytes"] = nbytes
    trailers["digest"] = digests
    return trailers


def compare_trailers(found: Sealed, wanted: Sealed) -> OutcomeArray:
    """Compare stored trailers with the expected ones.

    Returns:
        uint8 (n,): OK, SHORT or LONG where a valid trailer of this key gives
        another length, and otherwise CORRUPT.
    """
    same = _rows(found) == _rows(wanted)
    if same.all():
        return np.full(len(found), int(Outcome.OK), np.uint8)
    if np.count_nonzero(_dated(found)):
        return _compare_any(found, wanted)
    outcomes = np.where(same.all(axis=1), Outcome.OK, Outcome.CORRUPT)
    ours = (
        (found["magic"] == wanted["magic"])
        & (found["format"] == wanted["format"])
        & (found["key"] == wanted["key"])
    )
    outcomes[ours & (found["nbytes"] < wanted["nbytes"])] = Outcome.SHORT
    outcomes[ours & (found["nbytes"] > wanted["nbytes"])] = Outcome.LONG
    return outcomes.astype(np.uint8)


def make_dated_trailers(
    keys: Sequence[str],
    nbytes: npt.ArrayLike,
    digests: UInt64Array,
    *,
    expire_at: npt.ArrayLike = 0,
    tenant: npt.ArrayLike = 0,
    key_id: npt.ArrayLike = 0,
) -> Sealed:
    """Return trailers of format 2, for objects that are not sealed.

    Args:
        keys: The n keys.
        nbytes: (n,) or one number, bytes of each object.
        digests: uint64 (n,), XXH3-64 of each object's bytes.
        expire_at: Seconds since 1970 from which on they are not served.
        tenant: Number of the tenant that they belong to.
        key_id: For tests of what a reader makes of it.
    """
    rows = np.empty(len(keys), DATED_TRAILER)
    rows["magic"], rows["format"] = _DATED_MAGIC, DATED_FORMAT
    rows["key_id"], rows["tenant"], rows["expire_at"] = key_id, tenant, expire_at
    rows["nbytes"] = nbytes
    rows["key"] = trailer_key_digests(keys)
    rows["digest"] = digests ^ _bound(rows)
    return rows.view(TRAILER)


def is_sealed(trailer: bytes) -> bool:
    """Return whether an object's trailer says that it is sealed."""
    row = np.frombuffer(trailer, DATED_TRAILER)[0]
    dated = bool(_dated(np.frombuffer(trailer, TRAILER))[0])
    return dated and bool(row["key_id"])


def _dated(found: Sealed) -> npt.NDArray[np.bool_]:
    """Return which trailers are of format 2, bool (n,)."""
    head = _rows(found)[:, :2]
    return cast(
        "npt.NDArray[np.bool_]",
        (head[:, 0] == _DATED_MAGIC[0]) & (head[:, 1] == DATED_FORMAT),
    )


def _bound(rows: Sealed) -> UInt64Array:
    """Return what ties the fields of trailers to their digests, uint64 (n,).

    A reader does not know these fields beforehand. Odd factors: no change of one
    word leaves it the same.
    """
    words = _rows(rows)[:, :16].copy().view(np.uint64)
    return cast("UInt64Array", words[:, 0] * _FACTORS[0] + words[:, 1] * _FACTORS[1])


def _compare_any(found: Sealed, wanted: Sealed) -> OutcomeArray:
    """Compare trailers of both formats; what has expired is ABSENT."""
    which = _dated(found)
    outcomes = np.empty(len(found), np.uint8)
    outcomes[~which] = compare_trailers(found[~which], wanted[~which])
    expected = wanted[which]
    rows = np.ascontiguousarray(found[which]).view(DATED_TRAILER)
    # What is sealed belongs to another namespace, and has no digest of its bytes.
    ours = (rows["key"] == expected["key"]) & (rows["key_id"] == 0)
    whole = ours & (rows["digest"] == (expected["digest"] ^ _bound(rows)))
    whole &= rows["nbytes"] == expected["nbytes"]
    mine = np.where(whole, Outcome.OK, Outcome.CORRUPT)
    mine[ours & (rows["nbytes"] < expected["nbytes"])] = Outcome.SHORT
    mine[ours & (rows["nbytes"] > expected["nbytes"])] = Outcome.LONG
    over = (rows["expire_at"] != 0) & (rows["expire_at"] <= int(time.time()))
    mine[whole & over] = Outcome.ABSENT
    outcomes[which] = mine
    return outcomes


def _rows(trailers: Sealed) -> npt.NDArray[np.uint8]:
    plain = np.ascontiguousarray(trailers)
    return plain.view(np.uint8).reshape(len(plain), TRAILER_BYTES)


@attrs.frozen(eq=False)
class Hasher:
    """Hashes the pages of a region where they lie.

    Args:
        bases: int64 (objects, pieces), host address of each piece of page 0.
        strides: int64 (objects, pieces), bytes from page to page.
        sizes: int64 (objects, pieces), bytes; 0 for no piece.
    """

    bases: Int64Array = attrs.field(repr=False)
    strides: Int64Array = attrs.field(repr=False)
    sizes: Int64Array = attrs.field(repr=False)
    _space: memoryview = attrs.field(factory=address_space, init=False, repr=False)

    @classmethod
    def of(cls, region: Region) -> Hasher:
        """Prepare for the pages of a region."""
        return cls(region.bases, region.strides, region.sizes)

    def digests(self, pages: Int64Array) -> UInt64Array:
        """Return XXH3-64 of each page's objects, uint64 (n, objects)."""
        count, (objects, pieces) = len(pages), self.sizes.shape
        if count == pieces == 1:
            return np.array([self._of_one(int(pages[0]))], np.uint64)
        addresses = self.bases + self.strides * pages[:, None, None]
        sizes = self.sizes if objects == 1 else np.tile(self.sizes, (count, 1))
        found = checksums(addresses.reshape(-1, pieces), sizes)
        return found.reshape(count, objects)

    def _of_one(self, page: int) -> list[int]:
        """Hash the objects of one page, of one piece each, sooner than as arrays."""
        starts = (self.bases[:, 0] + self.strides[:, 0] * page).tolist()
        each = zip(starts, self.sizes[:, 0].tolist(), strict=True)
        digest = xxhash.xxh3_64_intdigest
        return [digest(self._space[start : start + size]) for start, size in each]


@attrs.frozen(eq=False)
class TrailerBuffers:
    """The trailers of a region's pages, one slot for each object of each page.

    A slot belongs to its page: the lease of the page, or its staging buffer,
    covers the slot too.

    Args:
        region: The memory that the backend moves, trailers included.
        hasher: Hashes the same pages without them.
        slots: For each object of a page its trailers, TRAILER (pages,).
        loan: The memory that the slots lie in.
    """

    region: Region
    hasher: Hasher = attrs.field(repr=False)
    slots: tuple[Sealed, ...] = attrs.field(repr=False)
    loan: HostBuffer = attrs.field(repr=False)

    @classmethod
    def attach_to(
        cls, region: Region, lend: Allocator = allocate_host
    ) -> TrailerBuffers:
        """Add trailers to the objects of a region.

        Returns:
            Trailers whose `region` has one more piece for each object: the
            memory that the backend moves.
        """
        shape = (region.pages, len(region.objects))
        buffer = lend(math.prod(shape) * SLOT_BYTES)
        wide = buffer.memory.reshape(*shape, SLOT_BYTES)
        slots = wide[..., :TRAILER_BYTES].view(TRAILER)[..., 0]
        base = wide.ctypes.data + SLOT_BYTES * np.arange(shape[1])
        tables = _with_piece(region, base, SLOT_BYTES * shape[1])
        longer = attrs.evolve(
            region,
            objects=tuple(map(with_trailer, region.objects)),
            bases=tables[0],
            strides=tables[1],
            sizes=tables[2],
            blocks=(*region.blocks, Block(wide.ctypes.data, wide.nbytes)),
            owners=(*region.owners, wide),
        )
        columns = tuple(slots[:, at] for at in range(shape[1]))
        return cls(longer, Hasher.of(region), columns, buffer)

    def write(self, keys: Sequence[str], pages: Int64Array, expire_at: int = 0) -> None:
        """Write the trailers of pages that are about to be stored.

        Args:
            keys: The n * objects keys, page-major.
            pages: int64 (n,), where the pages lie.
            expire_at: Not served from then on, seconds since 1970; 0 for never.
        """
        trailers = make_trailers(
            keys,
            self._nbytes(len(pages)),
            self.hasher.digests(pages).ravel(),
            expire_at=expire_at,
        )
        for at, slots in enumerate(self.slots):
            slots[pages] = trailers[at :: len(self.slots)]

    def expiries(self, pages: Int64Array) -> Int64Array:
        """Return when the loaded objects expire by their trailers, int64 (keys,)."""
        found = np.empty(len(pages) * len(self.slots), TRAILER)
        for at, slots in enumerate(self.slots):
            found[at :: len(self.slots)] = slots[pages]
        ends = found.view(DATED_TRAILER)["expire_at"].astype(np.int64)
        return np.where(_dated(found), ends, 0)

    def clear(self, pages: Int64Array) -> None:
        """Erase trailers, so that one left from before proves nothing."""
        for slots in self.slots:
            slots[pages] = np.zeros((), TRAILER)

    def verify(
        self, keys: Sequence[str], pages: Int64Array, outcomes: OutcomeArray
    ) -> OutcomeArray:
        """Verify what was read and is OK so far.

        Args:
            keys: The n * objects keys, page-major.
            pages: int64 (n,), where the pages were read to.
            outcomes: uint8 (n * objects,), as the backend returned them.
        """
        each = len(self.slots)
        few = len(pages) <= _FEW and not np.count_nonzero(outcomes)
        if few and self.all_right(keys, pages):
            return outcomes
        claimed = (outcomes == Outcome.OK).reshape(-1, each).all(axis=1)
        if not claimed.any():
            return outcomes
        read = pages[claimed]
        chosen = np.repeat(claimed, each)
        names = [key for key, one in zip(keys, chosen.tolist(), strict=True) if one]
        wanted = make_trailers(
            names, self._nbytes(len(read)), self.hasher.digests(read).ravel()
        )
        verified = outcomes.copy()
        found = np.empty_like(wanted)
        for at, slots in enumerate(self.slots):
            found[at::each] = slots[read]
        verified[chosen] = compare_trailers(found, wanted)
        return verified

    def all_right(self, keys: Sequence[str], pages: Int64Array) -> bool:
        """Return whether all trailers are as expected: `verify` in plain numbers.

        Args:
            keys: The n * objects keys, page-major.
            pages: int64 (n,), those that were read.
        """
        each = len(self.slots)
        sizes = self.region.object_bytes.tolist()
        digests = self.hasher.digests(pages).ravel().tolist()
        numbers = pages.tolist()
        for row, (key, digest) in enumerate(zip(keys, digests, strict=True)):
            name = xxhash.xxh3_128_digest(key.encode())
            nbytes = sizes[row % each] - TRAILER_BYTES
            wanted = _PLAIN.pack(_MAGIC, FORMAT, name, nbytes, digest)
            if self.slots[row % each][numbers[row // each]].tobytes() != wanted:
                return False
        return True

    def _nbytes(self, pages: int) -> Int64Array:
        each = self.region.object_bytes - TRAILER_BYTES
        return np.tile(each, pages)


def with_trailer(stored: StoredObject) -> StoredObject:
    """Return an object as a backend sees it, trailer included."""
    return attrs.evolve(stored, nbytes=stored.nbytes + TRAILER_BYTES)


def _with_piece(region: Region, base: Int64Array, stride: int) -> npt.NDArray[np.int64]:
    """Return bases, strides and sizes with a piece more, int64 (3, o, s + 1)."""
    rows, width = region.sizes.shape
    tables = np.zeros((3, rows, width + 1), np.int64)
    tables[:, :, :width] = region.bases, region.strides, region.sizes
    # Right behind the last piece: a zero in between would end the row early.
    last = (region.sizes > 0).sum(axis=1)
    tables[0, np.arange(rows), last] = base
    tables[1, np.arange(rows), last] = stride
    tables[2, np.arange(rows), last] = TRAILER_BYTES
    # A table that was narrower everywhere keeps no column of zeros.
    return tables[:, :, : int(last.max()) + 1]
