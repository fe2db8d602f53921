"""Slots that fit the chunks of 3FS.

Storage servers rewrite a chunk for a write that does not fill it, under a lock. A
slot across a boundary would cost two of these. A file has one writer, so slots that
share a chunk never wait for another host.
"""

from __future__ import annotations

LEAST_BYTES = 512


def slot_bytes(object_bytes: int, chunk: int, least: int = LEAST_BYTES) -> int:
    """Return the bytes of a slot: a divisor of a chunk, or a multiple of it.

    Args:
        object_bytes: Size of the objects, at least 1.
        chunk: Size of a chunk, a multiple of `least`.
        least: Smallest slot; slots are multiples of it.
    """
    if object_bytes >= chunk:
        return -(-object_bytes // chunk) * chunk
    pieces = chunk // max(object_bytes, least)
    while chunk % pieces or chunk // pieces % least:
        pieces -= 1
    return chunk // pieces
