"""Threads that help one call: they run what is queued, and end with the process.

`concurrent.futures` joins its threads when the interpreter ends, so a read that
never ends would keep the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

_Calls = SimpleQueue[tuple[Future[None], Callable[[], None]] | None]


class DaemonThreads:
    """Daemon threads, each started when it is first needed."""

    def __init__(self, most: int, name: str = "kvdock-io") -> None:
        self._most = most
        self._name = name
        self._calls: _Calls = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call; the threads run calls in order of submission.

        Raises:
            RuntimeError: If no thread can be started.
        """
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(
                    target=_serve,
                    args=(self._calls,),
                    name=f"{self._name}-{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

    def close(self, *, wait: bool = True) -> None:
        """End the threads, and wait for them; a later call starts new ones."""
        with self._lock:
            ending, self._threads = self._threads, []
        for _ in ending:
            self._calls.put(None)
        for thread in ending if wait else ():
            thread.join()


def _serve(calls: _Calls) -> None:
    while asked := calls.get():
        future, call = asked
        if future.set_running_or_notify_cancel():
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)
            else:
                future.set_result(None)
        # A call references a batch and its memory.
        del asked, future, call
