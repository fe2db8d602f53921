"""One NIXL agent with its UCX backend, for transfers between two processes.

It calls NIXL's native classes: the handles of its Python wrapper release a transfer
when they are collected, also one whose bytes are still under way, and its agents
keep a core busy (the progress thread polls without a pause: 1.4 % of a core with a
pause of 1 ms, measured with 1.5.1).
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.errors import KvdockError
from kvdock.own_sockets import accept_nothing, listening_ports
from kvdock.peers.connections import TransferLost
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.ucx_transports import is_fenced

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.arrays import Int64Array
    from kvdock_nixl.library import Library

PROBE_BYTES = 8
"""Bytes that a sender writes to find out whether a peer is reached."""

_UCX = "UCX"
_TRANSPORTS = "UCX_TLS"
_PAUSE_US = 1000
_SCRATCH_BYTES = 64
_EAGER_S = 0.05
"""How long a transfer is asked after without a pause."""
_PAUSE_S = 100e-6
_LEAVE_S = 2.0
_LAST_REFERENCES = 3
"""Counted by `sys.getrefcount` in `close`: the field, a variable, the argument."""

_ENVIRONMENT = threading.Lock()
_ABANDONED: list[UcxAgent] = []
"""Agents with calls that have not ended: destroying one would be unsafe."""


@contextmanager
def _variable(transports: str) -> Iterator[None]:
    """Give UCX its transports, which it reads when a backend is made."""
    with _ENVIRONMENT:
        before = os.environ.get(_TRANSPORTS)
        os.environ[_TRANSPORTS] = transports
        try:
            yield
        finally:
            if before is None:
                del os.environ[_TRANSPORTS]
            else:
                os.environ[_TRANSPORTS] = before


class UcxAgent:
    """An agent that listens, or one that sends.

    Safe to use from several threads. UCX listens in both. One that sends would take
    connections on a thread of its own, and close them with its next transfer only: a
    process had no descriptor left after 1,000 connections that had been closed at once.
    So what arrives at its ports is dropped.

    Args:
        transports: As in UCX_TLS.
        listens: Whether peers write to it; it then has a thread that takes bytes.

    Raises:
        KvdockError: If UCX cannot be used here.
    """

    def __init__(self, library: Library, transports: str, *, listens: bool) -> None:
        native = library.native
        self._errors = library.errors
        self._native = native
        self.name = f"kvdock-{secrets.token_hex(8)}"
        # What a peer has begun may land after this agent's end.
        self._open_end = listens and not is_fenced(transports)
        config = native.nixlAgentConfig()
        config.useProgThread = listens
        config.useListenThread = False
        config.pthrDelay = _PAUSE_US
        config.lthrDelay = _PAUSE_US
        # The default does not lock at all: several threads end the process.
        config.syncMode = native.NIXL_THREAD_SYNC_RW
        config.captureTelemetry = not listens
        try:
            self._raw = native.nixlAgent(self.name, config)
            parameters, _ = self._raw.getPluginParams(_UCX)
            with _variable(transports):
                before = listening_ports()
                self._backend = self._raw.createBackend(_UCX, parameters)
                opened = listening_ports() - before
        except self._errors as error:
            raise KvdockError(
                f"NIXL cannot use UCX with the transports {transports!r}: {error}",
                fix="Set ucx_transports (UCX_TLS) to what `ucx_info -d` shows.",
            ) from error
        self._scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        self._known: dict[tuple[int, int], Any] = {}
        self._parked: list[int] = []
        self._pid = os.getpid()
        self._calls = 0
        self._closed = False
        self._lock = threading.Condition()
        if not listens:
            accept_nothing(self._own(opened))
        self.register([(self.scratch_address, self._scratch.nbytes)])

    def _own(self, opened: frozenset[int]) -> frozenset[int]:
        """Return those of some ports that are in the address of this agent.

        Another thread of the process may have begun to listen at the same moment.
        """
        address = self.metadata()
        return frozenset(port for port in opened if port.to_bytes(2, "big") in address)

    @property
    def scratch_address(self) -> int:
        """A few bytes that any peer may write to."""
        return int(self._scratch.ctypes.data)

    def register(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Register memory that is not registered yet.

        Args:
            ranges: Address and size of each piece, bytes.
        """
        native = self._native
        for address, nbytes in ranges:
            if (address, nbytes) in self._known or not nbytes:
                continue
            found = native.nixlRegDList(native.DRAM_SEG, [(address, nbytes, 0, "")])
            try:
                self._raw.registerMem(found, [self._backend])
            except self._errors as error:
                raise KvdockError(
                    f"NIXL cannot register {nbytes} bytes at {address:#x}: {error}",
                    fix="Run `kvdock doctor nixl`.",
                ) from error
            self._known[address, nbytes] = found

    def metadata(self) -> bytes:
        """Return what a peer's agent has to know."""
        return bytes(self._raw.getLocalMD())

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer's agent known.

        Raises:
            TransferLost: If it is not reached, or the metadata are not its own.
        """
        try:
            found = self._raw.loadRemoteMD(metadata)
        except self._errors as error:
            raise TransferLost(str(error)) from error
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            raise TransferLost(f"its metadata are those of {found!r}")

    def write(self, peer: str, table: Int64Array, deadline_s: float) -> None:
        """Write rows into a peer's memory; all are there when it returns.

        Args:
            peer: The name of the peer's agent.
            table: int64 (3, n): addresses here, addresses there, bytes.
            deadline_s: When to give up, on `time.monotonic()`'s clock.

        Raises:
            TransferLost: If an unknown part was written; the caller ends the
                connection, and until then the rest may be under way.
        """
        if os.getpid() != self._pid:
            raise TransferLost("this process was forked after NIXL was set up")
        with self._lock:
            if self._closed:
                raise TransferLost("the agent is closed")
            self._calls += 1
        try:
            self._write(peer, table, deadline_s)
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def _write(self, peer: str, table: Int64Array, deadline_s: float) -> None:
        raw, native = self._raw, self._native
        rows = np.zeros((2, table.shape[1], 3), np.uint64)
        rows[0, :, 0], rows[1, :, 0] = table[0], table[1]
        rows[:, :, 1] = table[2]
        try:
            local = native.nixlXferDList(native.DRAM_SEG, rows[0])
            remote = native.nixlXferDList(native.DRAM_SEG, rows[1])
            handle = raw.createXferReq(
                native.NIXL_WRITE, local, remote, peer, b"", [self._backend]
            )
        except self._errors as error:
            raise TransferLost(str(error)) from error
        try:
            state = raw.postXferReq(handle, b"")
            eager_s = time.monotonic() + _EAGER_S
            while state == native.NIXL_IN_PROG:
                now_s = time.monotonic()
                if self._closed or now_s >= deadline_s:
                    # Never released: its bytes may be under way.
                    self._parked.append(handle)
                    raise TransferLost("it did not end in time")
                # Bytes move only while NIXL is asked: this agent has no thread for it.
                if now_s < eager_s:
                    os.sched_yield()
                else:
                    time.sleep(_PAUSE_S)
                state = raw.getXferStatus(handle)
            counted = raw.getXferTelemetry(handle).totalBytes
        except self._errors as error:
            if self._closed:
                self._parked.append(handle)
            else:
                raw.releaseXferReq(handle)
            raise TransferLost(str(error)) from error
        raw.releaseXferReq(handle)
        if state != native.NIXL_SUCCESS or counted != int(table[2].sum()):
            raise TransferLost(f"NIXL counted {counted} bytes, state {state}")
        MOVED.add(Way.NIXL_SEND, counted)

    def reach(self, peer: str, scratch: int, deadline_s: float) -> None:
        """Write a few bytes to a peer's scratch, and wait until they arrived."""
        table = np.array([[self.scratch_address], [scratch], [PROBE_BYTES]], np.int64)
        self.write(peer, table, deadline_s)

    def end(self) -> None:
        """Make its calls fail, those that run and any later one."""
        self._closed = True

    def close(self, patience_s: float = _LEAVE_S) -> bool:
        """Destroy the agent; return whether no byte moves through it any more.

        Its calls notice that it is to end. An agent that has calls all the same is
        kept for ever.
        """
        if os.getpid() != self._pid:
            return False
        self.end()
        with self._lock:
            if self._raw is None:
                return not self._open_end
            self._lock.wait_for(lambda: not self._calls, patience_s)
            raw = self._raw
            if self._calls or sys.getrefcount(raw) > _LAST_REFERENCES:
                if self not in _ABANDONED:
                    _ABANDONED.append(self)
                return False
            self._known.clear()
            self._raw = None
            del raw
        return not self._open_end
