"""Calls that never return: found by their own limit, not by the run's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

Answer = SimpleQueue[tuple[Any, BaseException | None]]


class DidNotReturn(AssertionError):  # noqa: N818 - says what happened
    """A call of the plugin has not returned; its thread is abandoned."""


class _Worker:
    """A daemon thread that runs one call after another."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Callable[[], object] | None, Answer]]
        self.calls = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            call, answer = self.calls.get()
            if call is None:
                return
            result: tuple[Any, BaseException | None]
            try:
                result = call(), None
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                result = None, error
            # It refers to the batch, which must not outlive its call.
            del call
            answer.put(result)
            del answer, result


class Watchdog:
    """Runs calls on worker threads and stops waiting for those that hang.

    Engines call a plugin from several threads as well. A worker is used again,
    since plugins may keep something for each thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._process = os.getpid()

    def run(self, call: Callable[[], T], limit_s: float, what: str) -> T:
        """Return what a call returns, or raise what it raises.

        Args:
            call: What to do.
            limit_s: How long to wait.
            what: What to call it in the message.

        Raises:
            DidNotReturn: If it has not returned by then.
        """
        answer: Answer = SimpleQueue()
        worker = self._take()
        worker.calls.put((call, answer))
        try:
            value, error = answer.get(timeout=limit_s)
        except Empty:
            raise DidNotReturn(
                f"{what} has not returned after {limit_s:.1f} s"
            ) from None
        with self._lock:
            self._idle.append(worker)
        if error is not None:
            raise error
        found: T = value
        return found

    def _take(self) -> _Worker:
        if self._process != os.getpid():
            # The threads of the parent do not run in a forked child, and one
            # of them may have held the lock.
            self._lock, self._idle = threading.Lock(), []
            self._process = os.getpid()
        with self._lock:
            return self._idle.pop() if self._idle else _Worker()

    def close(self) -> None:
        """End the workers that are idle; one that hangs is left to itself."""
        while self._idle:
            worker = self._idle.pop()
            worker.calls.put((None, SimpleQueue()))
            worker.thread.join()
