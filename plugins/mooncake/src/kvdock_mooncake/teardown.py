"""Tear the library's engines and stores down without the interpreter's lock.

Its Python classes do this under the lock: a destructor joins the thread that takes
handshakes, which looks once a second whether it is to end, and not at all while a
connection trickles bytes to it. Measured with 0.3.13.post1: 1.0 s for each engine and
2.1 s for each store, 11 s under eight connections that trickled for 11 s, and the
library reads for up to 300 s.

So the C++ method that does the work is called through `ctypes`, which releases the
lock, and meanwhile the connections of that thread are shut. The Python object is
dropped afterwards, when nothing is left to join. Where a release of the library lacks
the method, the Python object does the work as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs

from kvdock.own_sockets import accept_again, listens, own_tcp_sockets
from kvdock_mooncake.shutdown import BACKGROUND_CALLS, STORES

PATIENCE_S = 5.0
"""How long a caller waits for the end of an engine or a store, which goes on then."""

_FREE_ENGINE = "_ZN8mooncake14TransferEngine10freeEngineEv"
_CLOSE_CLIENT = {
    "_ZTVN8mooncake10RealClientE": "_ZN8mooncake10RealClient11tearDownAllEv",
    "_ZTVN8mooncake11DummyClientE": "_ZN8mooncake11DummyClient11tearDownAllEv",
}
"""The table of virtual methods of each class of clients, and its method."""

_FIRST_METHOD_BYTES = 16
"""Where the methods of such a table begin, by the Itanium C++ ABI."""
_FIELD_OF_VALUE_BYTES = 16
"""Where an object of pybind11 has the address of its C++ object."""

_HANDSHAKE_TIMEOUT = struct.pack("@ll", 1, 0)
"""SO_RCVTIMEO of a socket on which the library waits for handshakes: one second."""

_FIRST_ROUND_S, _LONGEST_ROUND_S = 0.002, 0.05


# --- The connections of strangers ---------------------------------------------


def handshake_ports() -> frozenset[int]:
    """Return the ports on which the library takes handshakes in this process."""
    size = len(_HANDSHAKE_TIMEOUT)
    return frozenset(
        int(one.getsockname()[1])
        for one in own_tcp_sockets()
        if listens(one)
        and one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, size)
        == _HANDSHAKE_TIMEOUT
    )


def end_handshakes(ports: frozenset[int]) -> None:
    """Let the thread behind a port look whether it is to end.

    Shuts the connections that were accepted there, and opens one that wakes the thread
    if it waits for the next.
    """
    for one in own_tcp_sockets():
        with contextlib.suppress(OSError):  # its peer, or the library, was faster
            host, port, *_ = one.getsockname()
            if port not in ports:
                continue
            if listens(one):
                # That of a sender is deaf, and would not wake.
                accept_again(one)
                _knock(one.family, host, port)
            else:
                one.shutdown(socket.SHUT_RDWR)


def _knock(family: int, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as waking:
        waking.setblocking(False)
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared
        waking.connect_ex((loopback.get(host, host), port))


# --- The end of an engine or a store -------------------------------------------


@attrs.define(eq=False)
class Teardown:
    """The end of an engine or a store, on a thread of its own.

    Args:
        work: Ends it, with the interpreter's lock released.
        ports: Where it takes handshakes.
        then: Called on that thread with the result of `work`.
    """

    work: Callable[[], int]
    ports: frozenset[int]
    then: Callable[[int], object] = lambda _: None
    _begun: bool = attrs.field(default=False, init=False)
    _done: threading.Event = attrs.field(factory=threading.Event, init=False)

    def start(self) -> Teardown:
        """Begin, unless the process ends: then nothing is torn down."""
        self._begun = BACKGROUND_CALLS.begin()
        if self._begun:
            for target in (self._run, self._interrupt):
                threading.Thread(
                    target=target, name="kvdock-teardown", daemon=True
                ).start()
        return self

    def wait(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait for a while; return whether the end is done."""
        return self._begun and self._done.wait(patience_s)

    def _run(self) -> None:
        try:
            self.then(self.work())
        finally:
            self._done.set()
            BACKGROUND_CALLS.finish()

    def _interrupt(self) -> None:
        pause_s = _FIRST_ROUND_S
        while not self._done.wait(pause_s):
            end_handshakes(self.ports)
            pause_s = min(2 * pause_s, _LONGEST_ROUND_S)


def end_engine(
    engine: Any,  # noqa: ANN401 - the library's own class
    around: AbstractContextManager[None] | None = None,
) -> Teardown:
    """Begin to end a TransferEngine that makes no call, within a context.

    The caller drops its references to it.
    """
    ports = frozenset((int(engine.get_rpc_port()),))
    free = _function(engine, _FREE_ENGINE)
    held = [engine]

    def work() -> int:
        with around or contextlib.nullcontext():
            last = held.pop()
            status = free(last.get_engine_ptr()) if free else 0
            STORES.discard(last)
            del last
        return status

    return Teardown(work, ports).start()


def end_store(
    store: Any,  # noqa: ANN401 - the library's own class
    then: Callable[[int], object] = lambda _: None,
    patience_s: float = PATIENCE_S,
) -> bool:
    """Close a store that makes no call; return whether that is done.

    `then` is called with the library's status when it is closed, also where that is
    later.
    """
    native = _client_of(store)

    def work() -> int:
        status = native() if native else 0
        # Short now: a client is closed once.
        status = int(store.close() or 0) or status
        STORES.discard(store)
        return status

    return Teardown(work, STORES.ports_of(store), then).start().wait(patience_s)


def _function(native: object, name: str) -> Callable[[int], int] | None:
    """Return a C++ method of an object's library: it takes the object's address."""
    path = sys.modules[type(native).__module__].__file__
    try:
        found = getattr(ctypes.CDLL(path), name)
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p], ctypes.c_int
    return found  # type: ignore[no-any-return]  # ctypes has no types for it


def _client_of(store: object) -> Callable[[], int] | None:
    """Return the call that closes a store's client; None if it is not surely known.

    The Python object has the address of a C++ object, whose first field is the address
    of the client, and that begins with the address of its class's virtual methods. All
    three are read without trust, and the last one must be that of a known class.
    """
    path = sys.modules[type(store).__module__].__file__
    try:
        library = ctypes.CDLL(path)
        client = _word(_word(id(store) + _FIELD_OF_VALUE_BYTES))
        methods = _word(client)
    except OSError:
        return None
    for table, name in _CLOSE_CLIENT.items():
        try:
            first = ctypes.addressof(ctypes.c_char.in_dll(library, table))
        except ValueError:
            continue
        close = _function(store, name)
        if close and methods == first + _FIRST_METHOD_BYTES:
            return lambda: close(client)
    return None


def _word(address: int) -> int:
    """Read an address; one that is not mapped raises OSError."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:  # noqa: PTH123 - unbuffered
        found = os.pread(memory.fileno(), 8, address)
    return int.from_bytes(found, sys.byteorder)
