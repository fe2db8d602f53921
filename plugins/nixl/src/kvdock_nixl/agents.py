"""A NIXL agent with a storage backend, and its transfers."""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvdock_nixl.settings import NIXL_BACKENDS, IOMethod

if TYPE_CHECKING:
    from kvdock.arrays import UInt64Array
    from kvdock_nixl.library import Library

MOST_DESCRIPTORS = 2048
"""Descriptors of one transfer. An agent that is given more at once than its pool
of 65536 holds rejects them, and never gets those places back."""

_MOST_TRANSFERS = 16
"""Transfers under way on one agent: half of its pool of descriptors."""

_SPINS = 64
"""Polls of a transfer before the first sleep."""

_NUMBERS = itertools.count()


class TransferError(Exception):
    """NIXL reported that a transfer failed; it says no more than that."""


class Agent:
    """One NIXL agent with one storage backend.

    Safe to use from several threads.

    Raises:
        KvdockError: If NIXL cannot be used in this way here.
    """

    def __init__(self, library: Library, io: IOMethod) -> None:
        api = library.api
        self._errors = library.errors
        self._name = f"kvdock-{os.getpid()}-{next(_NUMBERS)}"
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=False,
            # The default creates UCX, in half a second.
            backends=[],
            # The default does not lock at all: several threads end the process.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        self._raw = api.nixl_agent(self._name, config)
        backend, parameters = NIXL_BACKENDS[io]
        self._raw.create_backend(backend, dict(parameters))
        self._free = threading.BoundedSemaphore(_MOST_TRANSFERS)

    def register(self, address: int, nbytes: int, *, fd: int | None = None) -> Any:  # noqa: ANN401 - NIXL's own
        """Make memory known, or an open file; return what `forget` takes."""
        if fd is None:
            return self._raw.register_memory([(address, nbytes, 0, "")], "DRAM")
        return self._raw.register_memory([(address, nbytes, fd, "")], "FILE")

    def forget(self, registered: Any) -> None:  # noqa: ANN401 - NIXL's own
        """End what `register` began."""
        self._raw.deregister_memory(registered)

    def begin(
        self,
        memory: UInt64Array,
        file: UInt64Array,
        wait_until_s: float,
        *,
        write: bool,
    ) -> Any | None:  # noqa: ANN401 - NIXL's own
        """Begin a transfer.

        Args:
            memory: uint64 (n, 3), address, bytes and 0.
            file: uint64 (n, 3), offset, bytes and descriptor of the file.
            wait_until_s: How long to wait while too many are under way, on
                `time.monotonic()`'s clock.
            write: Whether bytes go to the file.

        Returns:
            What `finish` takes, or None if there was no place in time.

        Raises:
            TransferError: If it cannot begin; then nothing moves.
        """
        left_s = min(max(0.0, wait_until_s - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._free.acquire(timeout=left_s):
            return None
        raw = self._raw
        try:
            handle = raw.initialize_xfer(
                "WRITE" if write else "READ",
                raw.get_xfer_descs(memory, "DRAM"),
                raw.get_xfer_descs(file, "FILE"),
                self._name,
            )
        except self._errors as error:
            self._free.release()
            raise TransferError(str(error)) from error
        except BaseException:
            self._free.release()
            raise
        try:
            raw.transfer(handle)
        except self._errors as error:
            # Some of it may be under way.
            with suppress(TransferError):
                self.finish(handle)
            raise TransferError(str(error)) from error
        return handle

    def finish(self, handle: Any) -> None:  # noqa: ANN401 - NIXL's own
        """Wait for a transfer, however long it takes.

        It cannot be cancelled: NIXL frees a handle that is released while its I/O
        runs, and the bytes of a later transfer are then reported as moved when
        they were not.
        """
        try:
            self._wait(handle)
        except self._errors as error:
            # By now everything that it began has ended.
            raise TransferError(str(error)) from error
        except BaseException:
            # A signal's handler raised, and the bytes still move.
            with suppress(*self._errors):
                self._wait(handle)
            raise
        finally:
            handle.release()
            self._free.release()

    def _wait(self, handle: Any) -> None:  # noqa: ANN401 - NIXL's own
        polls = 0
        while self._raw.check_xfer_state(handle) == "PROC":
            polls += 1
            if polls > _SPINS:
                time.sleep(min(20e-6 * (polls - _SPINS), 1e-3))
