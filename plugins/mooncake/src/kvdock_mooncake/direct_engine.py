"""One TransferEngine of the library, for transfers between two processes.

It is separate from the store: closing it is what ends its transfers, and the store
goes on. Measured with 0.3.13.post1 over TCP, under a sender that is stopped in the
middle of a piece: after the receiver has unregistered its memory, the rest of the
piece still lands (15 to 34 MB of 64 MiB in two of two runs), because an address is
checked once per piece. After the receiver's engine was destroyed nothing lands.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.errors import KvdockError, PluginError
from kvdock_mooncake.connect import limit_patience, own_address, reject_fork
from kvdock_mooncake.library import load
from kvdock_mooncake.preconditions import check_transport
from kvdock_mooncake.shutdown import BACKGROUND_CALLS, STORES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock import Block
    from kvdock.arrays import Int64Array
    from kvdock_mooncake.library import Wheel
    from kvdock_mooncake.settings import MooncakeSettings

SINCE = "0.3.13"
"""First release whose receiver confirms a write over TCP after it was applied. Earlier
ones call it done when it has entered the sender's socket."""

PROBE_BYTES = 8
"""Bytes that a sender writes to find out whether a peer is reached."""

_UNCONFIRMED = ("MC_TCP_PROTO", "1")
_SCRATCH_BYTES = 64
_LAST_REFERENCES = 3
"""Counted by `sys.getrefcount` in `_destroy`: the field, a variable, the argument."""


def why_not(wheel: Wheel) -> str:
    """Return what keeps a release from direct transfers; empty for nothing."""
    if not wheel.is_since(SINCE):
        return (
            f"{wheel} calls a write done before it has arrived; {SINCE} and newer "
            "releases wait for the receiver"
        )
    name, value = _UNCONFIRMED
    if os.environ.get(name) == value:
        return f"{name}={value} turns off the receiver's confirmations"
    return ""


class EngineClosed(Exception):  # noqa: N818 - handled by callers of `write`
    """The engine makes no call: it is closed, or in a forked child."""


@attrs.define(eq=False)
class DirectEngine:
    """A TransferEngine and its running calls.

    Args:
        address: Where peers reach it, "host:port".
        blocks: The memory that it has registered.
    """

    address: str
    blocks: tuple[Block, ...]
    _raw: Any
    _scratch: Any
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def open(cls, settings: MooncakeSettings, blocks: Iterable[Block]) -> DirectEngine:
        """Start an engine and register memory with it.

        Raises:
            KvdockError: If the library cannot do this here.
        """
        reject_fork()
        limit_patience(settings)
        check_transport(settings)
        library = load()
        if reason := why_not(library.wheel):
            raise PluginError(reason, fix=f"Use {SINCE} or newer, and unset it.")
        raw = importlib.import_module("mooncake.engine").TransferEngine()
        status = raw.initialize(
            own_address(settings),
            settings.metadata_server,
            settings.protocol,
            settings.devices,
        )
        if status:
            raise KvdockError(
                f"the Mooncake library starts no transfer engine: {status}",
                fix="Look at the library's lines on standard error.",
            )
        host = own_address(settings)
        host = f"[{host}]" if ":" in host else host
        scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        known = tuple(block for block in blocks if block.nbytes)
        addresses = [block.address for block in known]
        sizes = [block.nbytes for block in known]
        # This call frees the interpreter meanwhile, which `register_memory` does not.
        status = raw.batch_register_memory(
            [*addresses, int(scratch.ctypes.data)], [*sizes, scratch.nbytes]
        )
        if status:
            raise KvdockError(
                f"the Mooncake library does not register {len(known)} blocks of "
                f"{sum(sizes)} bytes for peers: {status}",
                fix="Look at the library's lines on standard error.",
            )
        STORES.add(raw)
        return cls(f"{host}:{raw.get_rpc_port()}", known, raw, scratch)

    @property
    def scratch_address(self) -> int:
        """A few bytes that any peer may write to."""
        return int(self._scratch.ctypes.data)

    def write(
        self, peer: str, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> bool:
        """Write rows into a peer's memory; return whether all are there.

        Blocks for as long as the library does: with the timeouts that the plugin
        sets, some 3 s under a peer that is frozen. If it returns False, an unknown
        part was written and the rest may still be under way until `close`.

        Args:
            peer: The address of the peer's engine.
            local: int64 (n,), addresses here.
            remote: int64 (n,), addresses there.
            sizes: int64 (n,), bytes.

        Raises:
            EngineClosed: If no call may be made.
        """
        if os.getpid() != self._pid or not BACKGROUND_CALLS.begin():
            raise EngineClosed
        try:
            with self._lock:
                if self._closed:
                    raise EngineClosed
                self._calls += 1
            try:
                status = self._raw.batch_transfer_sync_write(
                    peer, local.tolist(), remote.tolist(), sizes.tolist()
                )
                return not status
            finally:
                self._leave()
        finally:
            BACKGROUND_CALLS.finish()

    def reach(self, peer: str, scratch: int) -> bool:
        """Write a few bytes to a peer's scratch; return whether they arrived."""
        here, there = np.array([self.scratch_address]), np.array([scratch])
        return self.write(peer, here, there, np.array([PROBE_BYTES]))

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            last = self._closed and not self._calls
        if last:
            self._destroy()

    def close(self) -> bool:
        """Destroy the engine once no call runs; return whether that is done.

        True says that its threads have ended and its connections are closed: it
        reads and writes no memory of this process any more.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            self._closed = True
            if self._calls:
                return False
        if self._raw is not None:
            self._destroy()
        return self._raw is None

    def _destroy(self) -> None:
        """Drop the last reference: the destructor joins the engine's threads."""
        STORES.discard(self._raw)
        raw = self._raw
        if sys.getrefcount(raw) > _LAST_REFERENCES:
            # Another reference keeps it: peers could still write.
            return
        self._raw = None
        del raw
