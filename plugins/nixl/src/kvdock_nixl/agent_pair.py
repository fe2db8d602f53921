"""The agents of this process: one that reads and one that writes.

Two, because writes of large pages hold up reads of small ones in the one queue of
an agent: with buffered AIO, 16 reads of 64 KiB beside writes of 4 MiB took 65 ms
on one agent and 0.13 ms on two. All pools with the same settings share them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import KvdockError
from kvdock_nixl.agents import Agent
from kvdock_nixl.bounce_buffers import BounceBuffers
from kvdock_nixl.library import load
from kvdock_nixl.preconditions import why_not

if TYPE_CHECKING:
    from kvdock import Block
    from kvdock_nixl.settings import IOMethod

_WHOLE_FILE = 1 << 46
"""Bytes of a file that are registered: NIXL does not compare them with its size."""

_Forget = Callable[[], None]


class AgentPair:
    """A reader, a writer, and what all pools share beside them.

    Raises:
        KvdockError: If NIXL cannot be used in this way here.
    """

    def __init__(self, io: IOMethod) -> None:
        library = load()
        try:
            self._agents = {write: Agent(library, io) for write in (False, True)}
        except library.errors as error:
            what, fix = why_not(io)
            raise KvdockError(
                f"NIXL {library.version} cannot move bytes with {io.value}: "
                f"{what or error}",
                fix=fix or "Run `kvdock doctor nixl`.",
            ) from error
        self._errors = library.errors
        self.pid = os.getpid()
        self.bounce = BounceBuffers(self._register_memory)
        self._blocks: dict[Block, tuple[int, _Forget]] = {}
        self._lock = threading.Lock()

    def agent(self, *, write: bool) -> Agent:
        """Return the agent for a direction."""
        return self._agents[write]

    def add_block(self, block: Block) -> None:
        """Register the memory of a pool, unless another pool has."""
        with self._lock:
            users, forget = self._blocks.get(block) or (
                0,
                self._register_memory(block.address, block.nbytes),
            )
            self._blocks[block] = (users + 1, forget)

    def drop_block(self, block: Block) -> None:
        """End a registration once no pool needs it."""
        with self._lock:
            users, forget = self._blocks.pop(block)
            if users > 1:
                self._blocks[block] = (users - 1, forget)
                return
            forget()

    def register_file(self, fd: int) -> _Forget:
        """Register an open file; return what ends that, before it is closed."""
        return self._register(0, _WHOLE_FILE, fd)

    def _register_memory(self, address: int, nbytes: int) -> _Forget:
        return self._register(address, nbytes, None)

    def _register(self, address: int, nbytes: int, fd: int | None) -> _Forget:
        done: list[tuple[Agent, Any]] = []

        def forget() -> None:
            while done:
                agent, registered = done.pop()
                agent.forget(registered)

        try:
            # As far as it comes, so that what was registered is forgotten.
            done.extend(
                (agent, agent.register(address, nbytes, fd=fd))
                for agent in self._agents.values()
            )
        except self._errors as error:
            forget()
            what = f"{nbytes} bytes at {address:#x}" if fd is None else "a file"
            raise KvdockError(
                f"NIXL cannot register {what}: {error}",
                fix="Run `kvdock doctor nixl`.",
            ) from error
        return forget

    def close(self) -> None:
        """End the agents; nothing is under way."""
        self.bounce.close()
        self._agents.clear()


@attrs.define(eq=False)
class _Shared:
    """A pair and how many pools use it."""

    pair: AgentPair
    users: int = 0


class SharedAgents:
    """The pairs of a process, one for each way of moving bytes."""

    def __init__(self) -> None:
        self._shared: dict[IOMethod, _Shared] = {}
        self._lock = threading.Lock()
        self._pid = 0

    def acquire(self, io: IOMethod) -> AgentPair:
        """Return the pair for a way of moving bytes; make it if there is none."""
        self._check_fork()
        with self._lock:
            found = self._shared.get(io)
            if found is None:
                found = self._shared[io] = _Shared(AgentPair(io))
                self._pid = os.getpid()
            found.users += 1
            return found.pair

    def release(self, io: IOMethod) -> None:
        """Give a pair back; the last pool closes it."""
        with self._lock:
            found = self._shared[io]
            found.users -= 1
            if not found.users:
                del self._shared[io]
                found.pair.close()

    def _check_fork(self) -> None:
        """Reject a child before it meets a lock that its parent may have held."""
        if self._pid not in (0, os.getpid()):
            raise KvdockError(
                f"process {os.getpid()} was forked from {self._pid} after that one "
                "used NIXL, whose queues do not survive a fork",
                fix='Start processes with "spawn" or "forkserver", or before any of '
                "them attaches.",
            )


AGENTS = SharedAgents()
"""Of this process: memory and queues are one for all attachments."""
