"""Make bytes of a file unreadable that are not served any more."""

from __future__ import annotations

import ctypes
import os

_ZEROS = bytes(1 << 20)
_PUNCH_HOLE = 0x02 | 0x01  # and keep the size
_LIBRARY = ctypes.CDLL(None)


def wipe(fd: int, offset: int, nbytes: int, *, punch: bool = False) -> None:
    """Overwrite bytes with zeros, or give their blocks back to the file system.

    Where a new page waits for their place, `punch` spares it the time of writing twice;
    a file system that cannot do it has them overwritten.
    """
    if punch and _punched(fd, offset, nbytes):
        return
    for start in range(0, nbytes, len(_ZEROS)):
        os.pwrite(fd, _ZEROS[: min(len(_ZEROS), nbytes - start)], offset + start)


def _punched(fd: int, offset: int, nbytes: int) -> bool:
    fallocate = getattr(_LIBRARY, "fallocate64", None)  # as the C library has it
    if fallocate is None or not nbytes:
        return False
    begin, length = ctypes.c_int64(offset), ctypes.c_int64(nbytes)
    return not fallocate(ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE), begin, length)
