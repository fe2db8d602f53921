"""Threads that help a call to move its pages: they end with the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.daemon_threads import DaemonThreads

Work = Callable[[int, int], None]
"""Moves what is numbered from the first number up to, not including, the second."""
Tasks = Sequence[tuple[int, int]]


class _Job:
    """Tasks of one call, which its own thread and helpers take one by one."""

    def __init__(self, work: Work, tasks: Tasks) -> None:
        self._work = work
        self._tasks = deque(tasks)
        self._lock = threading.Lock()
        self._helping = 0
        self._over = self._awaited = False
        self._last_left = threading.Lock()
        self._last_left.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do tasks until none is left."""
        while True:
            try:
                first, stop = self._tasks.popleft()
            except IndexError:
                return
            self._work(first, stop)

    def help(self) -> None:
        """Do tasks on another thread, unless the call has ended."""
        with self._lock:
            if self._over:
                return
            self._helping += 1
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - raised in the call
            self._error = error
        with self._lock:
            self._helping -= 1
            last = self._awaited and not self._helping
        if last:
            self._last_left.release()

    def end(self) -> None:
        """Let no helper begin any more: the call loses its memory."""
        self._tasks.clear()
        with self._lock:
            self._over = True
            self._awaited = self._helping > 0
        if self._awaited:
            self._last_left.acquire()
        if self._error is not None:
            raise self._error


def share(helpers: DaemonThreads, work: Work, tasks: Tasks) -> None:
    """Do tasks on this thread, and on as many helpers as there are tasks for."""
    job = _Job(work, tasks)
    try:
        with suppress(RuntimeError):  # a limit of the system: this thread does it all
            helpers.submit(job.help, len(tasks) - 1)
        job.run()
    finally:
        job.end()
