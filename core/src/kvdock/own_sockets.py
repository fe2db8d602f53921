"""This process's own TCP sockets, as the transfer libraries have opened them.

A library that listens has no setting for who may connect, and none for how it ends. The
kernel has: a socket that is found by its address can be shut, or filtered.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_PROC = "/proc/self/fd"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""Of Linux; Python's `socket` does not name them."""
_DROP = struct.pack("@HBBI", 6, 0, 0, 0)
"""A classic BPF program of one instruction: return 0, of no packet any byte."""


def own_tcp_sockets() -> Iterator[socket.socket]:
    """Yield each TCP socket of this process, through a descriptor of its own.

    Finds none where there is no `/proc`.
    """
    for name in os.listdir(_PROC) if os.path.isdir(_PROC) else ():  # noqa: PTH208, PTH112 - a Path costs ten times that
        # Another thread may close any of them at any time, and reuse its number.
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if not os.readlink(f"{_PROC}/{name}").startswith("socket:"):  # noqa: PTH115 - same
                continue
            twin = os.dup(int(name))
            opened.callback(os.close, twin)
            one = socket.socket(fileno=twin)
            opened.pop_all()
            with one:
                inet = one.family in (socket.AF_INET, socket.AF_INET6)
                if inet and one.type == socket.SOCK_STREAM:
                    yield one


def listens(one: socket.socket) -> bool:
    """Return whether a socket takes connections."""
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening_ports() -> frozenset[int]:
    """Return the ports on which this process takes connections."""
    return frozenset(
        int(one.getsockname()[1]) for one in own_tcp_sockets() if listens(one)
    )


def accept_nothing(ports: frozenset[int]) -> None:
    """Make this process deaf on ports: the kernel drops what arrives there.

    The socket stays open, so that the library behind it notices nothing.
    """
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    given = struct.pack("@HP", 1, ctypes.addressof(program))
    for one in own_tcp_sockets():
        with contextlib.suppress(OSError):
            if listens(one) and one.getsockname()[1] in ports:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)


def accept_again(one: socket.socket) -> None:
    """Take connections on a socket that `accept_nothing` may have made deaf."""
    with contextlib.suppress(OSError):  # it was not
        one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
