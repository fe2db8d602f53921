"""A server of blobs in a process of its own, and what the tests do to it.

Nothing but the standard library: it starts in a blink.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

START_S = 20.0


def send(link: socket.socket, what: object) -> None:
    data = pickle.dumps(what)
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket) -> Any:
    """Receive one message; raise EOFError at the end."""
    (nbytes,) = struct.unpack("!I", _exactly(link, 4))
    return pickle.loads(_exactly(link, nbytes))  # noqa: S301 - a process of the tests


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        part = link.recv(min(nbytes, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


class _Blobs:
    """Blobs by key, in memory, and in a folder if there is one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None
        self.blobs: dict[str, bytes] = {}
        self.refuses = False
        for path in sorted(self.folder.glob("*.blob")) if self.folder else ():
            key, blob = pickle.loads(path.read_bytes())  # noqa: S301 - its own file
            self.blobs[key] = blob

    def answer(self, do: str, key: str, blob: bytes) -> Any:
        if do == "refuse":
            self.refuses = blob == b"yes"
            return None
        if self.refuses:
            return OSError("refused")
        match do:
            case "read":
                return self.blobs.get(key)
            case "write":
                self.blobs[key] = blob
                if self.folder:
                    aside = self._path(key).with_suffix(".new")
                    aside.write_bytes(pickle.dumps((key, blob)))
                    aside.rename(self._path(key))
            case "remove":
                self.blobs.pop(key, None)
                if self.folder:
                    self._path(key).unlink(missing_ok=True)
            case "names":
                return list(self.blobs)
            case "used":
                return sum(map(len, self.blobs.values()))
        return None

    def _path(self, key: str) -> Path:
        assert self.folder
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.blob"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def serve(port: int, folder: str) -> None:
    """Serve until the process ends; print the port."""
    blobs = _Blobs(folder)

    class One(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    send(self.request, blobs.answer(*receive(self.request)))
                except (EOFError, OSError):
                    return

    with _Server(("127.0.0.1", port), One) as server:
        print(server.server_address[1], flush=True)  # noqa: T201 - who started it reads it
        server.serve_forever()


def _runs(process: subprocess.Popen[str]) -> bool:
    """Return whether a process is not stopped."""
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "T"


@attrs.define(eq=False)
class Servers:
    """Processes of the server above, which can be taken away and come back."""

    folders: tuple[str, ...]
    ports: list[int] = attrs.field(factory=list)
    processes: list[subprocess.Popen[str]] = attrs.field(factory=list)

    @property
    def addresses(self) -> str:
        """Return where they listen, with commas between them."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        """Start one, at its old port if it had one."""
        known = number < len(self.ports)
        process = subprocess.Popen(
            [
                *(sys.executable, __file__),
                *(str(self.ports[number] if known else 0), self.folders[number]),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        port = int(process.stdout.readline())
        if known:
            self.processes[number] = process
        else:
            self.processes.append(process)
            self.ports.append(port)

    def stop(self, number: int) -> None:
        process = self.processes[number]
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()

    @contextmanager
    def stopped(self, numbers: Iterable[int]) -> Iterator[None]:
        """Let some of them be gone while a block runs."""
        numbers = list(numbers)
        for number in numbers:
            self.stop(number)
        try:
            yield
        finally:
            for number in numbers:
                self.start(number)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let all of them answer nothing while a block runs."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGSTOP)
        # The signal is sent, and not yet obeyed, when that returns.
        end_s = time.monotonic() + 60
        while any(map(_runs, self.processes)):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        try:
            yield
        finally:
            for process in self.processes:
                os.kill(process.pid, signal.SIGCONT)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Let all of them answer with an error while a block runs."""
        self._refuse(b"yes")
        try:
            yield
        finally:
            self._refuse(b"no")

    def _refuse(self, word: bytes) -> None:
        for port in self.ports:
            with socket.create_connection(("127.0.0.1", port), START_S) as link:
                send(link, ("refuse", "", word))
                receive(link)


@contextmanager
def running(*folders: str) -> Iterator[Servers]:
    """Start a server for each folder ("" for memory alone), and end them all."""
    servers = Servers(folders)
    try:
        for number in range(len(folders)):
            servers.start(number)
        yield servers
    finally:
        for number in range(len(servers.processes)):
            servers.stop(number)


@attrs.define(eq=False)
class Client:
    """One connection to one server, made again where it was lost or inherited."""

    port: int
    link: socket.socket | None = None
    home: int = 0

    def ask(self, do: str, key: str, blob: bytes, deadline_s: float) -> Any:
        """Ask in time, or raise an OSError; what comes later is not read."""
        if self.home != os.getpid():
            # A socket that parent and child shared would mix their answers.
            self.link = None
        try:
            if self.link is None:
                left_s = max(deadline_s - time.monotonic(), 0.001)
                address = ("127.0.0.1", self.port)
                self.link = socket.create_connection(address, left_s)
                self.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.home = os.getpid()
            self.link.settimeout(max(deadline_s - time.monotonic(), 0.001))
            send(self.link, (do, key, blob))
            answer = receive(self.link)
        except (OSError, EOFError) as error:
            self.close()
            raise error if isinstance(error, OSError) else ConnectionError from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
