"""Worker threads: daemons that run what they are given, and wait for the next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvdock.synchronization import remaining_s

Task = Callable[[], "Callable[[], None] | None"]
"""What a worker does; it returns what is done once the worker is free again."""

Inbox = SimpleQueue[Task | None]


class CallRejected(RuntimeError):  # noqa: N818 - becomes an outcome
    """No worker does the call: shut down, forked, or at capacity.

    Or the system could not start a thread; the message then says so.
    """


class Workers:
    """Daemon threads, started when they are needed.

    The interpreter does not wait for them: one may sit in a client library for ever.

    Args:
        name: Begins the names of the threads.
        keep: Threads that stay when they have nothing to do.
    """

    def __init__(self, name: str, keep: int) -> None:
        self._name = name
        self._keep = keep
        self._lock = threading.Lock()
        self._closed = False
        # An inbox each: one condition for all would wake all of them.
        self._idle: list[Inbox] = []
        self._inboxes: dict[threading.Thread, Inbox] = {}

    def __len__(self) -> int:
        """Return how many threads there are, idle ones included."""
        return len(self._inboxes)

    def take(self) -> Inbox:
        """Return the inbox of an idle thread, or of a new one, for one task.

        Raises:
            CallRejected: If no thread can be started: a limit of the system.
        """
        with self._lock:
            if self._idle and not self._closed:
                # The most recent one: its memory is still in the caches.
                return self._idle.pop()
        inbox: Inbox = SimpleQueue()
        thread = threading.Thread(
            target=self._serve,
            args=(inbox,),
            name=f"{self._name}-{len(self._inboxes)}",
            daemon=True,
        )
        try:
            self._inboxes[thread] = inbox
            thread.start()
        except BaseException as error:
            self._inboxes.pop(thread, None)
            inbox.put(None)  # after an interrupt it may have begun
            if isinstance(error, RuntimeError):
                raise CallRejected(str(error)) from error
            raise
        return inbox

    def close(self) -> None:
        """Let each thread end after what it does now."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            inboxes = list(self._inboxes.values())
        for inbox in inboxes:
            inbox.put(None)

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads of closed workers; return whether they have ended."""
        threads = list(self._inboxes)
        for thread in threads:
            thread.join(remaining_s(deadline_s))
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, inbox: Inbox) -> None:
        staying = True
        while staying and (task := inbox.get()) is not None:
            after = task()
            del task  # an idle thread must not keep memory alive
            with self._lock:
                staying = not self._closed and len(self._idle) < self._keep
                if staying:
                    self._idle.append(inbox)
            if after is not None:
                after()
            del after
        self._inboxes.pop(threading.current_thread(), None)
