"""Threads that help a call to move its pages: they end with the process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

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


class Helpers:
    """Helper threads, each started when it is first needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def share(self, work: Work, tasks: Tasks) -> None:
        """Do tasks on this thread, and on as many helpers as there are tasks for."""
        job = _Job(work, tasks)
        try:
            for _ in range(min(len(tasks) - 1, self._started(len(tasks) - 1))):
                self._jobs.put(job)
            job.run()
        finally:
            job.end()

    def _started(self, wanted: int) -> int:
        """Start up to so many threads, if that can be done; return how many run."""
        with self._lock:
            while len(self._threads) < min(wanted, self._most):
                thread = threading.Thread(
                    target=_serve,
                    args=(self._jobs,),
                    name=f"kvdock-io-{len(self._threads)}",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError:
                    break
                self._threads.append(thread)
            return len(self._threads)

    def close(self) -> None:
        """End the threads, and wait for them; a later call starts new ones."""
        with self._lock:
            ending, self._threads = self._threads, []
        for _ in ending:
            self._jobs.put(None)
        for thread in ending:
            thread.join()


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while job := jobs.get():
        job.help()
        del job  # it references the memory of a call
