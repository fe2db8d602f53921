"""This process's own TCP sockets, as the transfer libraries have opened them.

A library that listens has no setting for who may connect, and none for how it ends. The
kernel has: a socket that is found by its address can be shut, or filtered.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

_PROC = "/proc/self/fd"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""Of Linux; Python's `socket` does not name them."""
_DROP = struct.pack("@HBBI", 6, 0, 0, 0)
"""A classic BPF program of one instruction: return 0, of no packet any byte."""


def _twin(number: int) -> socket.socket:
    """Return a socket once more, which blocks or not as before.

    Both have that in common. Python's own `dup` makes them block, and a default timeout
    makes them not: the library that has opened the socket would wait in it for ever, or
    fail.
    """
    blocks, twin = os.get_blocking(number), os.dup(number)
    try:
        one = socket.socket(fileno=twin)
    except OSError:
        os.close(twin)
        raise
    if socket.getdefaulttimeout() is not None:
        os.set_blocking(twin, blocks)
    return one


def own_tcp_sockets() -> Iterator[socket.socket]:
    """Yield each TCP socket of this process, through a descriptor of its own.

    Finds none where there is no `/proc`.
    """
    for name in os.listdir(_PROC) if os.path.isdir(_PROC) else ():  # noqa: PTH208, PTH112 - a Path costs ten times that
        # Another thread may close any of them at any time, and reuse its number.
        with contextlib.suppress(OSError):
            if not os.readlink(f"{_PROC}/{name}").startswith("socket:"):  # noqa: PTH115 - same
                continue
            with _twin(int(name)) as one:
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
    for one in own_tcp_sockets():
        with contextlib.suppress(OSError):
            if listens(one) and one.getsockname()[1] in ports:
                program = ctypes.create_string_buffer(_DROP, len(_DROP))
                given = struct.pack("@HP", 1, ctypes.addressof(program))
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)


def end_connections(ports: frozenset[int]) -> None:
    """End the connections that came in on ports: the library learns of it as of a loss.

    It sends nothing to the other end any more, no farewell either. They are reset, as
    if this process were killed: after a shutdown their port is in use for a minute.
    """
    connect = ctypes.CDLL(None).connect
    nowhere = struct.pack("@H14x", socket.AF_UNSPEC)
    for one in own_tcp_sockets():
        with contextlib.suppress(OSError):
            if not listens(one) and one.getsockname()[1] in ports:
                connect(one.fileno(), nowhere, len(nowhere))


_ESTABLISHED = 1
"""The first byte of TCP_INFO, the state."""


def connected_sockets() -> dict[int, int]:
    """Return the inode and descriptor of each connection to another process."""
    found: dict[int, int] = {}
    ends, far = set(), {}
    for name in os.listdir(_PROC) if os.path.isdir(_PROC) else ():  # noqa: PTH208, PTH112 - as above
        with contextlib.suppress(OSError):
            number = int(name)
            inode = os.fstat(number).st_ino
            if not _is_connected(number, inode):
                continue
            with _twin(number) as twin:
                ends.add(twin.getsockname())
                far[inode] = twin.getpeername()
            found[inode] = number
    return {inode: number for inode, number in found.items() if far[inode] not in ends}


def _is_connected(number: int, inode: int) -> bool:
    """Return whether a descriptor is still this TCP socket, and connected."""
    try:
        if os.fstat(number).st_ino != inode or not os.readlink(  # noqa: PTH115 - as above
            f"{_PROC}/{number}"
        ).startswith("socket:"):
            return False
        with _twin(number) as twin:
            if twin.type != socket.SOCK_STREAM or twin.family == socket.AF_UNIX:
                return False
            state = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return bool(state == _ESTABLISHED)
    except OSError:
        return False


def any_connected(sockets: dict[int, int]) -> bool:
    """Return whether any of some connections still has its other end."""
    return any(_is_connected(number, inode) for inode, number in sockets.items())


def accept_again(one: socket.socket) -> None:
    """Take connections on a socket that `accept_nothing` may have made deaf."""
    with contextlib.suppress(OSError):  # it was not
        one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


_BOUND_S = 600.0
_MOST_BOUND = 128
_ROUND_S = 1.0


class BoundPorts:
    """Ports that stay with this process when what listened there has ended.

    Connections there are closed at once, on a thread: a caller that comes late with an
    old address is told so, instead of reaching what was opened next. A port is given
    back after ten minutes, or when 128 others have followed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[socket.socket, float] = {}
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def keep(self, ports: frozenset[int]) -> Iterator[None]:
        """Keep ports of this process; what listens there ends within the context.

        Their sockets go on listening: the kernel lets no other one share the port of a
        socket that listens, and has no such promise for one that is only bound.
        """
        twins = [
            _twin(one.fileno())
            for one in own_tcp_sockets()
            if listens(one) and one.getsockname()[1] in ports
        ]
        try:
            yield
        finally:
            if twins:
                self._add(twins)

    def _add(self, sockets: list[socket.socket]) -> None:
        with self._lock:
            for one in sockets:
                one.setblocking(False)
            begins = not self._until_s
            self._until_s |= dict.fromkeys(sockets, time.monotonic() + _BOUND_S)
            if begins:
                self._thread = threading.Thread(
                    target=self._refuse, name="kvdock-bound", daemon=True
                )
                self._thread.start()

    def _refuse(self) -> None:
        while sockets := self._current():
            # Unlike epoll it takes no descriptor, which would come and go.
            waiting = select.poll()
            known = {one.fileno(): one for one in sockets}
            for number in known:
                waiting.register(number, select.POLLIN)
            for number, _ in waiting.poll(_ROUND_S * 1000):
                with contextlib.suppress(OSError):
                    known[number].accept()[0].close()

    def give_back(self) -> None:
        """Give all ports back; what comes late may reach something else then.

        The thread closes them: a port stays taken while a poll looks at its socket.
        """
        with self._lock:
            self._until_s = dict.fromkeys(self._until_s, 0.0)
            thread = self._thread
        if thread is not None:
            thread.join(2 * _ROUND_S)

    def _current(self) -> list[socket.socket]:
        """Give back what has been bound for long enough; return the others."""
        with self._lock:
            over = len(self._until_s) - _MOST_BOUND
            now_s = time.monotonic()
            for number, (one, until_s) in enumerate([*self._until_s.items()]):
                if number < over or until_s < now_s:
                    one.close()
                    del self._until_s[one]
            return list(self._until_s)
