"""Move one object with `preadv` or `pwritev`, to learn why NIXL could not.

NIXL reports that a transfer failed, and neither an errno nor how many bytes
moved. The kernel says both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from kvdock_segments import address_space

_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_Move = Callable[[int, list[memoryview], int], int]


def move_by_kernel(
    fd: int, pieces: list[tuple[int, int]], offset: int, *, write: bool
) -> tuple[int, int]:
    """Move an object's pieces, one after the other in the file.

    Args:
        fd: The open file.
        pieces: Host address and bytes of each piece.
        offset: Where the object begins in the file.
        write: Whether it goes to the file.

    Returns:
        An errno, 0 for none, and the bytes that moved: fewer at a file's end.
    """
    space = address_space()
    left = [space[at : at + size] for at, size in pieces if size]
    call: _Move = os.pwritev if write else os.preadv
    done = 0
    try:
        while left:
            got = call(fd, left[:_MOST_BUFFERS], offset + done)
            if not got:
                return (errno.ENOSPC if write else 0), done
            done += got
            left = _after(left, got)
    except OSError as error:
        return error.errno or errno.EIO, done
    return 0, done


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of pieces after so many bytes."""
    for at, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[at + 1 :]]
        done -= len(view)
    return []
