"""Processes that send and take pages directly, for tests and benchmarks.

Each has a plugin's pool over memory in a file, which the test maps as well: so it
sees what lies there while the process is stopped, and nothing but the plugin's
library carries bytes from one file to the other.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

from kvdock import AttachConfig, Batch, Block
from kvdock.config import structure
from kvdock.errors import KvdockError
from kvdock.geometry.grid import Grid
from kvdock.geometry.matching import Rows, coalesce, match, move, packed
from kvdock.peers.connections import ConnectedPool

__all__ = [
    "Grid",
    "PeerProcess",
    "Rows",
    "Side",
    "address",
    "coalesce",
    "connected",
    "mapped",
    "match",
    "memory_file",
    "packed",
    "two_processes",
]

PATIENCE_S = 60.0

Memory = npt.NDArray[np.uint8]


def mapped(path: str) -> Memory:
    """Map a file that other processes map as well."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def address(memory: Memory) -> int:
    """Return where memory begins."""
    return int(memory.ctypes.data)


class Side:
    """One pool of a plugin, without its store.

    Args:
        backend: "mooncake" or "nixl".
        memory: The pool's memory.
        settings: Of the plugin.
    """

    def __init__(
        self, backend: str, memory: Memory, settings: dict[str, object]
    ) -> None:
        self.backend = backend
        self.plugin = importlib.import_module(f"kvdock_{backend}.plugin")
        library = importlib.import_module(f"kvdock_{backend}.peers")
        found = structure(
            self.plugin.kvdock_manifest().settings, settings, where="tests"
        )
        self.config = AttachConfig(settings=found, shared={})
        given = found if backend == "mooncake" else found.ucx_transports
        block = Block(address(memory), memory.nbytes)
        own = library.Connections(given)
        pool = ConnectedPool.of(self.config, [block], own)
        self.handle = SimpleNamespace(peers=pool)
        self.memory = memory
        self.peers: dict[int, object] = {}
        self.sent: dict[int, tuple[Any, float]] = {}

    def endpoint(self) -> tuple[bytes, int]:
        """Offer the pool; return the endpoint and the memory's address."""
        found = self.handle.peers.endpoint()
        return found, address(self.memory)

    def withdraw(self) -> bool:
        """Close the endpoint."""
        return bool(self.handle.peers.withdraw())

    def give_ports_back(self) -> None:
        """Let another endpoint have the ports of one that was withdrawn."""
        module = {"nixl": "ucx_agent", "mooncake": "peer_engine"}[self.backend]
        library = importlib.import_module(f"kvdock_{self.backend}.{module}")
        library.BOUND.give_back()

    def connect(self, endpoint: bytes, within_s: float = 20.0) -> int:
        """Connect to a peer; return its number."""
        deadline_s = time.monotonic() + within_s
        peer = self.handle.peers.connect(endpoint, deadline_s)
        self.peers[len(self.peers)] = peer
        return len(self.peers) - 1

    def disconnect(self, peer: int = 0) -> bool:
        """End a connection."""
        return bool(self.handle.peers.disconnect(self.peers[peer]))

    def batch(
        self, local: Any, remote: Any, sizes: Any, within_s: float = 30.0, peer: int = 0
    ) -> Batch:
        """Return a batch: places in this memory, addresses there, bytes."""
        return Batch.send(
            np.asarray(local, np.int64) + address(self.memory),
            np.asarray(remote, np.int64),
            np.asarray(sizes, np.int64),
            self.peers[peer],
            time.monotonic() + within_s,
            "kv",
        )

    def send(self, *arguments: Any) -> tuple[list[int], bool, float]:
        """Send rows; return outcomes, whether memory is held, and seconds."""
        batch, began = self.batch(*arguments), time.monotonic()
        result = self.handle.peers.send(batch)
        took = time.monotonic() - began
        return result.outcomes.tolist(), result.hold is not None, took

    def begin(self, number: int, *arguments: Any) -> None:
        """Send rows on a thread; see `end`."""

        def run() -> None:
            self.sent[number] = self.send(*arguments)  # type: ignore[assignment]

        threading.Thread(target=run, daemon=True).start()

    def end(self, number: int) -> Any:
        """Wait for what `begin` began."""
        until = time.monotonic() + PATIENCE_S * 2
        while number not in self.sent and time.monotonic() < until:
            time.sleep(0.001)
        return self.sent.pop(number)

    def fill(self, seed: int) -> None:
        """Fill the memory with the bytes of a seed, none of them 0."""
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(1, 256, self.memory.size, np.uint8)

    def set(self, value: int) -> None:
        """Fill the memory with one byte."""
        self.memory[:] = value

    def fork(self, *arguments: Any) -> Any:
        """Do a call in a forked child; return what came of it."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                answer = repr(getattr(self, str(arguments[0]))(*arguments[1:]))
            except BaseException as error:  # noqa: BLE001 - for the test to see
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(writing)
        with os.fdopen(reading) as file:
            found = file.read()
        os.waitpid(child, 0)
        return found

    def counted(self) -> int:
        """Return the bytes that NIXL says it has sent."""
        counts = importlib.import_module("kvdock_nixl.byte_counts")
        return int(counts.MOVED.read()[counts.Way.NIXL_SEND])

    def holds(self) -> tuple[int, int]:
        """Return how many descriptors and threads this process has."""
        of_this = Path("/proc/self")
        return len([*(of_this / "fd").iterdir()]), len([*(of_this / "task").iterdir()])

    def copy(self, source: Any, target: Any, sizes: Any) -> float:
        """Copy rows within this memory; return how many seconds it took."""
        base, began = address(self.memory), time.perf_counter()
        move(Rows(source + base, target + base, sizes, len(sizes)))
        return time.perf_counter() - began

    def leave(self) -> None:
        """Do what is done when the interpreter ends."""
        atexit._run_exitfuncs()

    def release(self) -> None:
        """Release the pool."""
        self.handle.peers.release()


def serve(
    link: Connection, backend: str, path: str, settings: Any, kind: Callable[..., Any]
) -> None:
    """Do what the test asks for, in a process of its own."""
    side = kind(backend, mapped(path), settings)
    link.send("ready")
    while True:
        try:
            name, *arguments = link.recv()
        except EOFError:
            os._exit(0)
        try:
            named = arguments.pop() if arguments and type(arguments[-1]) is dict else {}
            link.send((True, getattr(side, name)(*arguments, **named)))
        except KvdockError as error:
            link.send((False, str(error)))


class PeerProcess:
    """A process with one pool; `call` does what its side has.

    Args:
        backend: The plugin's name.
        path: File of the memory.
        settings: Of the plugin.
        kind: What the process makes of these.
        environment: Variables that it has besides those of this one.
    """

    def __init__(
        self,
        backend: str,
        path: str,
        settings: dict[str, object],
        kind: Callable[..., Any] = Side,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.memory = mapped(path)
        self.process = context.Process(
            target=serve, args=(theirs, backend, path, settings, kind), daemon=True
        )
        with pytest.MonkeyPatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            self.process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        assert self.link.poll(PATIENCE_S * 3), "no answer of the process"
        return self.link.recv()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the side."""
        self.link.send((name, *arguments))
        good, found = self._answer()
        if not good:
            raise KvdockError(found)
        return found

    def stop(self) -> None:
        """Stop the process where it is."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.kill()
        self.link.close()


@contextlib.contextmanager
def memory_file(nbytes: int) -> Iterator[str]:
    """Yield a file of zeros, in memory where that is possible."""
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
    with tempfile.NamedTemporaryFile(dir=folder, prefix="kvdock-peers-") as file:
        file.truncate(nbytes)
        yield file.name


@contextlib.contextmanager
def two_processes(
    backend: str,
    nbytes: int,
    settings: dict[str, object],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """Yield a sender and a receiver, not connected yet."""
    with (
        memory_file(nbytes) as mine,
        memory_file(nbytes) as theirs,
        PeerProcess(backend, mine, settings, environment=environment) as sender,
        PeerProcess(backend, theirs, settings, environment=environment) as receiver,
    ):
        yield sender, receiver


def connected(sender: PeerProcess, receiver: PeerProcess) -> int:
    """Connect both; return the address of the receiver's memory."""
    endpoint, base = receiver.call("endpoint")
    sender.call("connect", endpoint)
    return int(base)
