"""The layout of an index file: header, records, times of use.

One index file describes one segment of equal slots:

    0      64  header: what the segment is (see `HEADER`)
    64     64  number of commits, in the first 8 bytes; the rest is zero
    128    64  record of slot 0 (see `RECORD`), then of slot 1 and so on
    ...     8  time of last use of slot 0 in ns, then of slot 1 and so on

Everything is little-endian. The header and each record have a checksum, so torn,
misplaced and foreign records are ignored. A slot that could not be written has a
record of another kind: the same fields with other meanings (see `failed_records`)
and another checksum.

Decision 126 shows the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

from kvdock.arrays import BoolArray, Int64Array, UInt64Array

FORMAT_VERSION = 2
"""Version of the layout; files of later versions are neither read nor deleted."""

MAGIC = b"KVDOCKSG"
HEADER_BYTES = 64
COMMITS_AT = 64
DELETIONS_AT = 72
RECORDS_AT = 128
RECORD_BYTES = 64
USE_BYTES = 8
MOST_SLOTS = 1 << 16
"""Maximum number of slots of a segment: the number of one has 16 bits."""

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("generation", "<u4"),
        ("segment", "<u8"),
        ("slots", "<u8"),
        ("slot_bytes", "<u8"),
        ("object_bytes", "<u8"),
        ("reserved", "<u8"),
        ("check", "<u8"),
    ]
)

RECORD = np.dtype(
    [
        ("key_low", "<u8"),
        ("key_high", "<u8"),
        ("checksum", "<u8"),
        ("expire_at", "<u4"),  # seconds since 1970; 0 for never
        ("keep_until", "<u4"),  # seconds since 1970; 0 for no promise
        ("stored_ns", "<u8"),
        ("segment", "<u8"),
        ("tenant", "<u4"),  # 0 for none
        ("key_id", "<u2"),  # of the key that sealed the object; 0 for none
        ("slot", "<u2"),
        ("check", "<u8"),
    ]
)
"""One object. Its size is the header's `object_bytes`."""

Records = npt.NDArray[np.void]

# Odd constants of one line each, drawn once at random. The fold below is not
# xxh3 because a million records have to be checked in one numpy expression.
_FACTORS = np.array(
    [
        0x9E6C63D0976B2D1B,
        0xD1342543DE82EF95,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
        0x1D8E4E27C47D124F,
    ],
    np.uint64,
)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SALT = 0x6B76646F636B0000
_FAILED_SALT = 0x6B76646F62610000 + FORMAT_VERSION
_SLOT_SHIFT = np.uint64(48)
_EXPIRY = np.uint64(2**32 - 1)
_PROMISE = np.uint64(32)
_WORDS = RECORD_BYTES // 8
_WORD = 2**64 - 1
_FACTOR_ARRAYS = tuple(np.array(factor) for factor in _FACTORS)
_MIX_ARRAY = np.array(_MIX)
_SHIFT_ARRAY = np.array(29, np.uint64)
_PLAIN_FACTORS: tuple[int, ...] = tuple(_FACTORS.tolist())
_PLAIN_MIX = int(_MIX)
_PLAIN_SALT = _SALT + FORMAT_VERSION


CLOCK_SLACK_NS = 3600 * 10**9
"""How far ahead of this host's clock a time of use may be: clocks differ."""


def credible_uses(used_ns: Int64Array) -> Int64Array:
    """Return times of use, 0 for those that lie in the future.

    A clock that was ahead for a while leaves them. They would be the latest for
    ever: with pages of the year 2100 in a full store, 82 of 100 new pages were
    evicted at once.

    Args:
        used_ns: int64 (n,), ns since 1970.
    """
    ahead = used_ns > time.time_ns() + CLOCK_SLACK_NS
    return np.where(ahead, 0, used_ns) if ahead.any() else used_ns


def index_bytes(slots: int) -> int:
    """Return the size of the index file of a segment."""
    return RECORDS_AT + slots * (RECORD_BYTES + USE_BYTES)


def slots_of(nbytes: int) -> int:
    """Return how many slots an index file of this size describes."""
    return max(0, nbytes - RECORDS_AT) // (RECORD_BYTES + USE_BYTES)


def uses_at(slots: int) -> int:
    """Return where the times of use begin in an index file."""
    return RECORDS_AT + slots * RECORD_BYTES


def fold(rows: Records, salt: int = _PLAIN_SALT) -> UInt64Array:
    """Return the self-check of headers or records, uint64 (n,).

    Args:
        rows: (n,) of a 64-byte type whose last word is the check itself.
        salt: What version and kind of rows they are.
    """
    words = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, _WORDS)
    return _folded(words.T, salt)


def _folded(columns: UInt64Array, salt: int = _PLAIN_SALT) -> UInt64Array:
    """Return the self-check of rows given by column, uint64 (8, n)."""
    state = np.full(columns.shape[1], salt, np.uint64)
    shifted = np.empty_like(state)
    # Written out: operators and scalars of numpy take as long again for 100 rows.
    for column, factor in zip(columns, _FACTOR_ARRAYS, strict=False):
        np.bitwise_xor(state, column, state)
        np.multiply(state, factor, state)
        np.right_shift(state, _SHIFT_ARRAY, shifted)
        np.bitwise_xor(state, shifted, state)
    np.multiply(state, _MIX_ARRAY, state)
    np.right_shift(state, _SHIFT_ARRAY, shifted)
    np.bitwise_xor(state, shifted, state)
    return state


def with_checksums(rows: Records, salt: int = _PLAIN_SALT) -> Records:
    """Fill in the checksums of headers or records; return the same rows."""
    rows["check"] = fold(rows, salt)
    return rows


def records_of(
    digests: UInt64Array,
    checksums: UInt64Array,
    *,
    segment: int,
    slots: Int64Array,
    stored_ns: Int64Array,
    times: UInt64Array | int = 0,
    tenant: int = 0,
) -> Records:
    """Return the records of objects that were stored.

    Args:
        digests: uint64 (n, 2), of their keys.
        checksums: uint64 (n,), of their bytes.
        segment: Identity of the segment.
        slots: int64 (n,).
        stored_ns: int64 (n,), when each was stored.
        times: uint64 (n,) or one number, see `times_of`.
        tenant: Number of the tenant that they are stored for; 0 for none.
    """
    # Column by column: one contiguous row of memory for each word.
    columns = np.empty((_WORDS, len(slots)), np.uint64)
    columns[:2] = digests.T
    columns[2] = checksums
    columns[3] = times
    columns[4] = stored_ns
    columns[5] = segment
    columns[6] = slots
    columns[6] <<= _SLOT_SHIFT
    if tenant:
        columns[6] |= np.uint64(tenant)
    columns[7] = _folded(columns)
    return cast("Records", np.ascontiguousarray(columns.T).view(RECORD).reshape(-1))


def _fold_one(row: Sequence[int], salt: int = _PLAIN_SALT) -> int:
    """Return the self-check of one record in plain numbers: its other words."""
    state = salt
    for word, factor in zip(row, _PLAIN_FACTORS, strict=True):
        state = (state ^ word) * factor & _WORD
        state ^= state >> 29
    state = state * _PLAIN_MIX & _WORD
    return state ^ state >> 29


def failed_records(
    segment: int, slots: Int64Array, failures: Int64Array, retry_ns: Int64Array
) -> Records:
    """Return the records of slots that could not be written.

    They hold no object: `key_low` is the number of failures in a row, `stored_ns`
    the time before which the slot is not tried again.

    Args:
        segment: Identity of the segment.
        slots: int64 (n,).
        failures: int64 (n,).
        retry_ns: int64 (n,), ns since 1970.
    """
    rows = np.zeros(len(slots), RECORD)
    rows["key_low"], rows["stored_ns"] = failures, retry_ns
    rows["segment"], rows["slot"] = segment, slots
    return with_checksums(rows, _FAILED_SALT)


def are_failed(rows: Records, segment: int, slots: Int64Array) -> BoolArray:
    """Return which records are whole and say that a slot failed, bool (n,)."""
    good = rows["check"] == fold(rows, _FAILED_SALT)
    good &= (rows["segment"] == np.uint64(segment)) & (rows["slot"] == slots)
    return cast("BoolArray", good)


def header_of(
    segment: int, generation: int, slots: int, slot_bytes: int, object_bytes: int
) -> bytes:
    """Encode a header."""
    row = np.zeros(1, HEADER)
    row[0] = (
        MAGIC,
        FORMAT_VERSION,
        generation,
        segment,
        slots,
        slot_bytes,
        object_bytes,
        0,
        0,
    )
    return with_checksums(row).tobytes()


def parse_header(raw: bytes) -> Records | None:
    """Decode a header; None if it is torn, foreign or of another version."""
    if len(raw) < HEADER_BYTES:
        return None
    row = np.frombuffer(raw[:HEADER_BYTES], HEADER)
    if row["magic"][0] != MAGIC or row["version"][0] != FORMAT_VERSION:
        return None
    # In plain numbers: a start reads as many headers as there are segments.
    *words, check = row.view("<u8").tolist()
    return row if _fold_one(words) == check else None


def is_newer(raw: bytes) -> bool:
    """Return whether a header is that of a later version of the layout."""
    if len(raw) < HEADER_BYTES:
        return False
    row = np.frombuffer(raw[:HEADER_BYTES], HEADER)
    return bool(row["magic"][0] == MAGIC and row["version"][0] > FORMAT_VERSION)


def valid(rows: Records, header: Records, slots: Int64Array) -> BoolArray:
    """Return which records are whole and belong to their slots, bool (n,).

    Args:
        rows: The records as they are on disk, (n,).
        header: The header of the file that they were read from.
        slots: int64 (n,), the slots that they were read from.
    """
    good = rows["check"] == fold(rows)
    good &= rows["segment"] == header["segment"]
    good &= rows["slot"] == slots
    return cast("BoolArray", good)


def are_same(stored: Records, believed: Records) -> BoolArray:
    """Return which records on disk are the expected ones, bool (n,)."""
    same = records_in_words(stored) == records_in_words(believed)
    return cast("BoolArray", same.all(axis=1))


def times_of(keep_until: Int64Array, expire_at: Int64Array) -> UInt64Array:
    """Return the word of each record that has its times, uint64 (n,).

    Args:
        keep_until: int64 (n,), seconds since 1970; 0 for none.
        expire_at: The same.
    """
    return keep_until.astype(np.uint64) << _PROMISE | expire_at.astype(np.uint64)


def records_in_words(records: Records) -> UInt64Array:
    """Return records as they are on disk, uint64 (n, 8)."""
    words = np.ascontiguousarray(records).view(np.uint64)
    return cast("UInt64Array", words.reshape(-1, _WORDS))


def expired(words: UInt64Array, now_s: float, max_age_s: float = 0) -> BoolArray:
    """Return which records must not be served any more, bool (n,).

    Args:
        words: uint64 (n, 8), records.
        now_s: The time, seconds since 1970.
        max_age_s: How long those are served that say no time; 0 for ever.
    """
    expire_at = words[:, 3] & _EXPIRY
    over = (expire_at != 0) & (expire_at <= int(now_s))
    if max_age_s:
        oldest_ns = int((now_s - max_age_s) * 1e9)
        over |= (expire_at == 0) & (words[:, 4].astype(np.int64) <= oldest_ns)
    return cast("BoolArray", over)


def promised(words: UInt64Array) -> BoolArray:
    """Return which records may not be evicted now, bool (n,)."""
    return words[:, 3] >> _PROMISE > int(time.time())


def key_seed(namespace: str) -> int:
    """Return the seed of a namespace's key digests."""
    return int(namespace[:16], 16)


def packed_digests(keys: Sequence[str], seed: int) -> bytes:
    """Return 128-bit digests of keys, one after the other.

    The seed is the namespace's, so that a collision found in one namespace is none in
    another.
    """
    return b"".join(map(xxhash.xxh3_128_digest, map(str.encode, keys), repeat(seed)))


def key_digests(keys: Sequence[str], seed: int) -> UInt64Array:
    """Return 128-bit digests of keys, uint64 (n, 2), low word first."""
    return np.frombuffer(packed_digests(keys, seed), "<u8").reshape(-1, 2)
