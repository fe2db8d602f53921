"""An I/O engine for segments that moves bytes with NIXL.

Objects that lie as the device needs it move directly; others pass through bounce
buffers.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvdock.geometry import AddressRanges
from kvdock_nixl.agent_pair import AGENTS
from kvdock_nixl.bounced import move_bounced
from kvdock_nixl.call import BLOCK, Call
from kvdock_nixl.straight import move_straight, reachable
from kvdock_segments import UNREGISTERED, IOEngine, IORequest, IOResult, open_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from kvdock import Block
    from kvdock_nixl.agent_pair import AgentPair
    from kvdock_nixl.settings import IOMethod

_BUFFERED_BLOCK = 512


class NixlIOEngine(IOEngine):
    """Moves objects of one pool between registered memory and files.

    Args:
        blocks: The pool's memory; registered until `close`.
        direct: Bypass the page cache (O_DIRECT).
        on_close: Called once when nothing is under way after `close`.
    """

    def __init__(
        self,
        pair: AgentPair,
        blocks: Sequence[Block],
        *,
        direct: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._pair = pair
        self._direct = direct
        self._on_close = on_close
        self._blocks = [block for block in blocks if block.nbytes]
        self._known = AddressRanges.of((b.address, b.nbytes) for b in self._blocks)
        self._files: dict[int, Callable[[], None]] = {}
        self._calls = 0
        self._closed = False
        self._lock = threading.Lock()
        for at, block in enumerate(self._blocks):
            try:
                pair.add_block(block)
            except BaseException:
                for known in self._blocks[:at]:
                    pair.drop_block(known)
                raise

    @classmethod
    def open(cls, io: IOMethod, blocks: Sequence[Block], *, direct: bool) -> Self:
        """Make an engine on the agents that all pools of this process share."""
        pair = AGENTS.acquire(io)

        def give_back() -> None:
            AGENTS.release(io)

        try:
            return cls(pair, blocks, direct=direct, on_close=give_back)
        except BaseException:
            give_back()
            raise

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pair.pid

    def slot_bytes(self, object_bytes: int) -> int:
        """Round up to a block; see `IOEngine.slot_bytes`."""
        block = BLOCK if self._direct else _BUFFERED_BLOCK
        return -(-object_bytes // block) * block

    def open_file(self, name: str, folder: int, *, create: bool) -> int:
        """Open and register a file; see `IOEngine.open_file`."""
        fd = open_data(folder, name, create=create, direct=self._direct)
        if self._forked:
            return fd
        try:
            forget = self._pair.register_file(fd)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._files[fd] = forget
        return fd

    def close_file(self, token: int) -> None:
        """Close a file, first for NIXL: its descriptor may soon be another file's."""
        if not self._forked:
            with self._lock:
                forget = self._files.pop(token)
            forget()
        os.close(token)

    def close(self) -> None:
        """Deregister the pool's memory, once no call is under way."""
        if self._forked:
            return
        with self._lock:
            self._closed = True
            last = not self._calls
        if last:
            self._end()

    def _end(self) -> None:
        for block in self._blocks:
            self._pair.drop_block(block)
        self._on_close()

    def move(self, request: IORequest) -> IOResult:
        """Move objects; see `IOEngine.move`."""
        result = IOResult.of(len(request))
        if not len(request):
            return result
        if self._forked:
            result.errors[:] = errno.ECHILD
            return result
        with self._lock:
            self._calls += 1
        try:
            self._run(Call.of(self._pair, request, result, direct=self._direct))
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and not self._calls
            if last:  # the call was abandoned, and its pool released meanwhile
                self._end()
        return result

    def _run(self, call: Call) -> None:
        request, result = call.request, call.result
        if call.late:
            return
        known = self._known.covered_rows(request.addresses, request.sizes)
        result.errors[~known] = UNREGISTERED
        straight = known & reachable(call)
        move_straight(call, np.flatnonzero(straight))
        move_bounced(call, np.flatnonzero(known & ~straight))
