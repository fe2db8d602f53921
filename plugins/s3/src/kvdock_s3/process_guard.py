"""Keep the client library to the process that opened it.

Its runtime has threads, which a fork does not copy: in a child every call
would wait for ever, also through a client that the child makes itself.
"""

from __future__ import annotations

import os

import attrs

from kvdock import KvdockError


@attrs.define
class ProcessGuard:
    """Remembers the process that first used the library."""

    _pid: int = 0

    def enter(self) -> None:
        """Allow a use of the library, or reject it in a forked child."""
        pid = os.getpid()
        if not self._pid:
            self._pid = pid
        if pid != self._pid:
            raise KvdockError(
                f"process {pid} was forked from {self._pid} after that one used object "
                "storage, and the client does not survive a fork",
                fix='Start processes with "spawn" or "forkserver", or before any of '
                "them attaches.",
            )


GUARD = ProcessGuard()
"""Of this process: the runtime is one for all clients."""
