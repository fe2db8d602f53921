"""Calls of the library, and the end of the process.

A process that ends while a call of the library runs is aborted: the thread comes
back into an interpreter that is gone. So at the end no more calls begin, and those
that run are waited for. A forked child ends without the library's own exit handler,
which would join threads that only its parent has.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

log = logging.getLogger("kvdock")

_PATIENCE_S = 40.0
"""The library waits 30 s for a frozen standalone client, with any timeouts."""

# Looked up here: a forked child must not wait for a lock of the dynamic linker.
_LIBC = ctypes.CDLL(None)
_EXIT = _LIBC._exit  # noqa: SLF001 - C's own name
_ON_EXIT: Any = getattr(_LIBC, "on_exit", None)
"""Of glibc, which the library's wheels need."""


@attrs.define(eq=False)
class BackgroundCalls:
    """Calls of the library that run, on any thread."""

    _calls: int = attrs.field(default=0, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)

    def begin(self) -> bool:
        """Count a call; return whether it may be made, and is ended by `finish`."""
        with self._changed:
            self._calls += not self._ended
            return not self._ended

    def finish(self) -> None:
        """End what `begin` has counted."""
        with self._changed:
            self._calls -= 1
            if not self._calls:
                self._changed.notify_all()

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Yield whether a call may still be made, and count it."""
        may = self.begin()
        try:
            yield may
        finally:
            if may:
                self.finish()

    def end(self, patience_s: float = _PATIENCE_S) -> bool:
        """Reject new calls, and wait for those that run; return whether all ended."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._calls, patience_s)

    def forget(self) -> None:
        """Start over in a forked child: the threads in calls are its parent's."""
        self._calls, self._ended = 0, False
        self._changed = threading.Condition()


@attrs.define(eq=False)
class OpenStores:
    """The stores of this process that are set up."""

    _stores: list[tuple[Any, frozenset[int]]] = attrs.field(factory=list, init=False)
    setups: int = attrs.field(default=0, init=False)
    """How many were begun to be set up, ever."""
    running: int = attrs.field(default=0, init=False)
    """How many are being set up."""
    _counting: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def add(self, store: Any, ports: frozenset[int] = frozenset()) -> None:  # noqa: ANN401 - the library's own class
        """Note a store that has been set up, and where it takes handshakes."""
        self._stores.append((store, ports))

    def discard(self, store: Any) -> None:  # noqa: ANN401 - same
        """Forget a store that is closed."""
        self._stores = [one for one in self._stores if one[0] is not store]

    @contextmanager
    def setup(self) -> Iterator[None]:
        """Count a store that is being set up."""
        with self._counting:
            self.setups, self.running = self.setups + 1, self.running + 1
        try:
            yield
        finally:
            with self._counting:
                self.running -= 1

    def ports_of(self, store: Any) -> frozenset[int]:  # noqa: ANN401 - same
        """Return where a store takes handshakes."""
        found = (ports for one, ports in self._stores if one is store)
        return next(found, frozenset())

    def leave_to_the_parent(self) -> None:
        """Keep a forked child from ending its parent's stores.

        Their destructors, and the handler that the library has given to C's
        `exit`, join threads that the child does not have: it would crash
        (measured with 0.3.13).
        """
        if not self._stores:
            return
        for store, _ in self._stores:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        skip_exit_handlers()


def skip_exit_handlers() -> None:
    """End this process with its status before C's exit handlers run.

    Python has run its own handlers and flushed its files by then.
    """
    if _ON_EXIT is not None:
        _ON_EXIT(_EXIT, None)


BACKGROUND_CALLS = BackgroundCalls()
STORES = OpenStores()
"""Of this process."""


def _end() -> None:
    if not BACKGROUND_CALLS.end():
        log.error("a Mooncake call still runs at the end of the process")
        skip_exit_handlers()


def _forget() -> None:
    BACKGROUND_CALLS.forget()
    STORES.leave_to_the_parent()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
