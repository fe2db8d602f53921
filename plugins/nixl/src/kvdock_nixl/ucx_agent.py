"""One NIXL agent with its UCX backend, for transfers between two processes.

It calls NIXL's native classes: the handles of its Python wrapper release a transfer
when they are collected, also one whose bytes are still under way, and its agents
keep a core busy (the progress thread polls without a pause: 1.4 % of a core with a
pause of 1 ms, measured with 1.5.1).
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.errors import KvdockError
from kvdock.own_sockets import (
    BoundPorts,
    accept_nothing,
    end_connections,
    listening_ports,
)
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
_SYN_RETRIES = "UCX_TCP_SYN_CNT"
"""UCX connects on the thread of the caller, for 134 s to a host that does not answer;
with 2 retries for 7 s."""
_PAUSE_US = 1000
_SCRATCH_BYTES = 64
_EAGER_S = 0.05
"""How long a transfer is asked after without a pause."""
_PAUSE_S = 100e-6
_LEAVE_S = 2.0
_LAST_REFERENCES = 3
"""Counted by `sys.getrefcount` in `close`: the field, a variable, the argument."""

_HELLO = b"kvdock?"
"""Begins a sender's question; 16 random bytes and its metadata follow. The receiver
returns the bytes, in a notification that carries its name."""
_CHALLENGE_BYTES = 16
_ANSWER_PAUSE_S = 0.01
"""How often a receiver looks for questions: a sender asks once for each link."""
_ASK_AGAIN_S = 0.5
_MOST_SENDERS = 1024
"""Senders that a receiver knows; beyond that the oldest has to open its link again."""

_ENVIRONMENT = threading.Lock()
BOUND = BoundPorts()
"""The ports of receivers that were closed: no other agent listens where old tickets
lead to."""
_ABANDONED: list[UcxAgent] = []
"""Agents with calls that have not ended: destroying one would be unsafe."""


@contextmanager
def _variables(transports: str) -> Iterator[None]:
    """Give UCX its settings, which it reads when a backend is made."""
    with _ENVIRONMENT:
        names = (_TRANSPORTS, _SYN_RETRIES)
        before = {name: os.environ.get(name) for name in names}
        os.environ[_TRANSPORTS] = transports
        os.environ.setdefault(_SYN_RETRIES, "2")
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


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
        self._listens = listens
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
            with _variables(transports):
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
        self._ports = self._own(opened)
        self._senders: dict[str, None] = {}
        self.register([(self.scratch_address, self._scratch.nbytes)])
        if not listens:
            accept_nothing(self._ports)
            return
        self._calls += 1
        self._answering = threading.Thread(
            target=self._answer, name="kvdock-answer", daemon=True
        )
        self._answering.start()
        # A thread that is within the library when the interpreter ends aborts it.
        atexit.register(self._stop_answering)

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
        with self._calling():
            self._write(peer, table, deadline_s)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Count a call: the agent is not destroyed under it."""
        if os.getpid() != self._pid:
            raise TransferLost("this process was forked after NIXL was set up")
        with self._lock:
            if self._closed:
                raise TransferLost("the agent is closed")
            self._calls += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            self._lock.notify_all()

    def _ask(self, peer: str, deadline_s: float) -> None:
        """Wait until the peer has answered over the connection that is used for rows.

        No other way leads back: this agent takes no connection.
        """
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        message = _HELLO + challenge + self.metadata()
        raw, again_s = self._raw, 0.0
        try:
            while not (answers := raw.getNotifs({}, [self._backend])):
                now_s = time.monotonic()
                if self._closed or now_s >= deadline_s:
                    raise TransferLost("it did not answer in time")
                if now_s >= again_s:
                    # That a connection has failed is said by the next message alone.
                    raw.genNotif(peer, message, [self._backend])
                    message, again_s = b"", now_s + _ASK_AGAIN_S
                time.sleep(_PAUSE_S)
        except self._errors as error:
            raise TransferLost(str(error)) from error
        if challenge not in answers.get(peer, ()):
            raise TransferLost("another agent listens on its port")

    def _answer(self) -> None:
        """Answer the questions of senders, on a thread, until the agent is to end."""
        try:
            while not self._closed:
                for questions in self._notifications().values():
                    for question in questions:
                        if question.startswith(_HELLO):
                            self._reply(question[len(_HELLO) :])
                time.sleep(_ANSWER_PAUSE_S)
        finally:
            self._leave()

    def _stop_answering(self) -> None:
        self.end()
        self._answering.join(_LEAVE_S)
        # The interpreter destroys the agent next.
        end_connections(self._ports)

    def _notifications(self) -> dict[str, list[bytes]]:
        with suppress(*self._errors):
            return dict(self._raw.getNotifs({}, [self._backend]))
        return {}

    def _reply(self, question: bytes) -> None:
        challenge, metadata = (
            question[:_CHALLENGE_BYTES],
            question[_CHALLENGE_BYTES:],
        )
        # What is no question of an agent, or came from one that is gone by now.
        with suppress(*self._errors, UnicodeDecodeError):
            sender = self._raw.loadRemoteMD(metadata).decode()
            self._senders[sender] = None
            self._raw.genNotif(sender, challenge, [self._backend])
            if len(self._senders) > _MOST_SENDERS:
                oldest = next(iter(self._senders))
                del self._senders[oldest]
                self._raw.invalidateRemoteMD(oldest)

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
        """Write a few bytes to a peer's scratch, and wait until they arrived.

        Not before the peer has answered: UCX connects to whatever listens on a port,
        and writes to addresses that mean something in one process alone. A write to
        the scratch of an agent that was gone has ended the process on its port.
        """
        with self._calling():
            self._ask(peer, deadline_s)
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
            atexit.unregister(self._stop_answering)
            with BOUND.keep(self._ports) if self._listens else nullcontext():
                # UCX would take leave of each sender. One that still has rows to write
                # there frees a connection as it reads that, and writes on with it:
                # SIGSEGV in `uct_tcp_iface_progress` (1.23).
                end_connections(self._ports)
                del raw
        return not self._open_end
