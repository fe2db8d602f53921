"""The library in C, where it could be built; see `kvdock.native`, which uses it.

Apart from that, as `kvdock --version` asks for it and numpy takes long to import.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

import attrs

_VERSION = 5


@attrs.frozen(eq=False)
class Library:
    """The functions of the library.

    Args:
        move: Moves rows; see `kvdock.native.Movement`.
        leave_uncached: Looks for rows in the page cache; see there too.
        hash_rows: Hashes rows before they are written; see there too.
        hash: Hashes objects without the interpreter's lock.
        hash_locked: The same with the lock, for a few.
        find: Finds keys in the index of a page store; see `kvdock_segments.index`.
        look: Finds the pages of a call; this and what follows is for
            `kvdock_segments.call_arrays`.
        plan: Says where they lie.
        place_in_slots: Says where new pages go.
        record: Makes their records.
        insert: Inserts those into the index.
    """

    move: Any
    leave_uncached: Any
    hash_rows: Any
    hash: Any
    hash_locked: Any
    find: Any
    look: Any
    plan: Any
    place_in_slots: Any
    record: Any
    insert: Any


def library_path() -> str:
    """Return where the library is, if it could be built."""
    return f"{os.path.dirname(__file__)}/native/_pages.so"  # noqa: PTH120 - 5 ms to import


@functools.cache
def library() -> Library | None:
    """Return the library; None if there is none, or it is not to be used."""
    path = library_path()
    # The library hashes words as they lie in memory, lowest byte first.
    if sys.byteorder != "little" or os.environ.get("KVDOCK_PURE", "0") not in {"", "0"}:
        return None
    try:
        free, locked = ctypes.CDLL(path), ctypes.PyDLL(path)
        version = ctypes.c_int64.in_dll(free, "kvdock_version").value
        over_rows = (
            free.kvdock_move,
            free.kvdock_leave_uncached,
            free.kvdock_hash_rows,
        )
        hashing = free.kvdock_hash, locked.kvdock_hash
        number, pointer, word = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64
        # They take microseconds: giving the lock away would cost more.
        of_index: list[tuple[Any, list[Any]]] = [
            (locked.kvdock_find, [pointer, pointer, number, pointer]),
            (locked.kvdock_look, [pointer, pointer, pointer, number]),
            (locked.kvdock_plan, [pointer, pointer, number, number]),
            (locked.kvdock_place_in_slots, [pointer, number]),
            (locked.kvdock_record, [pointer, pointer, number, number, word, word]),
            (locked.kvdock_insert, [pointer, pointer, number, number, number]),
        ]
    except (OSError, ValueError, AttributeError):
        return None  # not built, or for another machine, or from another source
    if version != _VERSION:
        return None
    for function in over_rows:
        function.argtypes, function.restype = [pointer, number, number], None
    for function in hashing:
        function.argtypes = [number] * 3 + [pointer] * 3
        function.restype = number
    for function, arguments in of_index:
        function.argtypes, function.restype = arguments, number
    return Library(*over_rows, *hashing, *(function for function, _ in of_index))
