"""Processes that have imported already what takes seconds: one imports, and forks.

    process = warm(["torch"])([script, argument], environ, log)
    process.wait(60)

What is started has the script's arguments, its own environment, session and log. It
shares what was imported and the seed of hashes with others, and nothing else; a script
whose imports read variables is started by `cold`, the usual way.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Protocol

START_S = 300.0
"""How long importing may take, on a machine that others use."""


class Start(Protocol):
    """Starts a script."""

    def __call__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Forked | subprocess.Popen[bytes]:
        """Start it; its folder comes first where modules are looked for."""


def cold(
    command: Sequence[str], environ: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a script as users do."""
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environ,
        )


@functools.cache
def warm(modules: tuple[str, ...], seed: int = 1) -> Start:
    """Return what starts scripts after these imports, until this process ends.

    Args:
        modules: What is imported, in this order.
        seed: Of hashes: lives of an engine that share a store have two of them.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    log = Path(stack.enter_context(TemporaryDirectory())) / "log"
    environ = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return stack.enter_context(_importing(modules, environ, log))


class Forked:
    """A process that another one has forked; waited for as one of subprocess's."""

    def __init__(self, ask: Any, pid: int) -> None:
        self._ask = ask
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the status once it has ended."""
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: If it has not.
        """
        status = self._end(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            os.close(self._ended)
            self.returncode = int(self._ask({"wait": self.pid}))
        return self.returncode


@contextmanager
def _importing(
    modules: Sequence[str], environ: Mapping[str, str], log: Path
) -> Iterator[Start]:
    """Import modules in a process of their own; let it fork until the block ends."""
    here, there = socket.socketpair()
    with here, log.open("w") as output:
        with there:
            server = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno()), *modules],
                env=environ,
                pass_fds=[there.fileno()],
                stdout=output,
                stderr=output,
            )
        here.settimeout(START_S)
        answers, one_at_a_time = here.makefile("r"), threading.Lock()

        def ask(request: Mapping[str, object]) -> object:
            with one_at_a_time:
                here.sendall(json.dumps(request).encode() + b"\n")
                line = answers.readline()
            if not line:
                raise RuntimeError(log.read_text()[-4000:])
            return json.loads(line)

        def start(
            command: Sequence[str], environ: Mapping[str, str], log: Path
        ) -> Forked:
            request = {"command": command, "environ": dict(environ), "log": str(log)}
            return Forked(ask, int(str(ask(request))))

        try:
            with answers:
                yield start
        finally:
            here.shutdown(socket.SHUT_RDWR)
            server.wait(START_S)


def _become(request: Mapping[str, Any]) -> NoReturn:
    """Go on as a process of its own would begin, and end as it would."""
    os.setsid()
    with Path(request["log"]).open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    environ = request["environ"]
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = request["command"]
    path = [one for one in environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *path]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _serve(link: socket.socket) -> None:
    requests = link.makefile("r")
    for line in requests:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif not (answer := os.fork()):
            requests.close()
            link.close()
            _become(request)
        link.sendall(f"{answer}\n".encode())


if __name__ == "__main__":
    sys.path.pop(0)
    for name in sys.argv[2:]:
        import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
