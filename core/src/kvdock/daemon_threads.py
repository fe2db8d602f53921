"""Threads that help calls: they run what is queued, and end with the process.

`concurrent.futures` joins its threads when the interpreter ends, so a read that
never ends would keep the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("kvdock")

_Calls = SimpleQueue[Callable[[], object] | None]


class DaemonThreads:
    """Daemon threads, each started when it is first needed."""

    def __init__(self, most: int, name: str = "kvdock-io") -> None:
        self._most = most
        self._name = name
        self._calls: _Calls = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], object], times: int = 1) -> None:
        """Queue a call once for each of so many threads, as far as there are any.

        The threads run calls in order of submission. What one raises is logged.

        Raises:
            RuntimeError: If no thread can be started.
        """
        with self._lock:
            for number in range(
                len(self._threads), min(self._most, len(self._threads) + times)
            ):
                thread = threading.Thread(
                    target=_serve,
                    args=(self._calls,),
                    name=f"{self._name}-{number}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:
                    if not number:
                        raise
                    break
                self._threads.append(thread)
            for _ in range(min(times, len(self._threads))):
                self._calls.put(call)

    def close(self, *, wait: bool = True) -> None:
        """End the threads, and wait for them; a later call starts new ones."""
        with self._lock:
            ending, self._threads = self._threads, []
            for _ in ending:
                self._calls.put(None)
        for thread in ending if wait else ():
            thread.join()


def _serve(calls: _Calls) -> None:
    while call := calls.get():
        try:
            call()
        except BaseException:  # a defect of ours: the thread goes on
            log.exception("a call on thread %s", threading.current_thread().name)
        del call  # it references a batch and its memory
