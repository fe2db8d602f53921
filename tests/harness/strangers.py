"""Strangers who trickle bytes into a process's ports, and what its threads feel.

The strangers are a process of their own: their loop must not compete for the lock
that the test measures.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_TRICKLE = """
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
number, ports = int(sys.argv[1]), list(map(int, sys.argv[2:]))
sockets = []
for port in ports:
    for _ in range(number):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        sockets.append(one)
def trickle(data):
    for one in sockets:
        try:
            one.send(data)
        except OSError:
            pass
time.sleep(0.2)
trickle(bytes((0, 16)))
print("ready", flush=True)
until = time.monotonic() + 30
while time.monotonic() < until:
    time.sleep(0.2)
    trickle(bytes(1))
"""
"""Each says that 4096 bytes follow, and sends one of them five times a second."""


@contextlib.contextmanager
def trickling(number: int, ports: frozenset[int]) -> Iterator[None]:
    """Open connections to each port, and trickle bytes into all of them."""
    command = [sys.executable, "-c", _TRICKLE, str(number), *map(str, sorted(ports))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


class Heartbeat:
    """A thread that wants the interpreter's lock every 5 ms.

    The time for which threads of this process waited for a core is not counted, nor
    that for which a host of virtual machines took the cores away: on a busy machine one
    that has the lock is not run either. A thread that holds the lock while it sleeps,
    as a destructor that joins another thread does, waits for none.
    """

    _EVERY_S = 0.005

    def __init__(self) -> None:
        self.longest_s = self.second_s = 0.0
        self._begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        tasks = Path("/proc/self/task")

        def now() -> tuple[float, dict[str, float]]:
            """Return the time, and for how long each thread waited for a core, s."""
            waited = {}
            for task in tasks.iterdir():
                with contextlib.suppress(OSError):  # it has ended
                    delay_ns = int((task / "schedstat").read_text().split()[1])
                    waited[task.name] = delay_ns / 1e9
            cores = Path("/proc/stat").read_text().split(maxsplit=9)
            waited["stolen"] = int(cores[8]) / os.sysconf("SC_CLK_TCK")
            return time.monotonic(), waited

        then_s, before = now()
        self._begun.set()
        while not self._ends.is_set():
            time.sleep(self._EVERY_S)
            at_s, after = now()
            # Thread by thread: one that has ended takes its share with it.
            delayed_s = sum(
                max(0.0, after[one] - before.get(one, 0.0)) for one in after
            )
            kept_s = at_s - then_s - self._EVERY_S - delayed_s
            if kept_s > self.longest_s:
                self.longest_s, self.second_s = kept_s, self.longest_s
            else:
                self.second_s = max(self.second_s, kept_s)
            then_s, before = at_s, after

    def __enter__(self) -> Self:
        """Begin to measure.

        The objects of other tests are put aside: going through millions of them holds
        the lock for half a second, and says nothing of this test.
        """
        gc.collect()
        gc.freeze()
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()
