"""The reference backend over servers of blobs, which can be taken away."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import attrs
from reference import Handle, MemoryReference, ReferenceSettings, Shelf, ShelfOracle
from shelf_server import Client, Servers

from kvdock.batch import Batch, BatchResult, Outcome
from kvdock.plugin.manifest import Scope, Support
from kvdock.testing.oracles import Oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE_S = 30.0


@attrs.define(eq=False)
class ServerShelf:
    """Blobs on servers, divided by key; one connection for all threads."""

    clients: tuple[Client, ...]
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    times: threading.local = attrs.field(factory=threading.local)

    def ask(self, client: Client, do: str, key: str = "", blob: bytes = b"") -> Any:
        """Ask one server, by the deadline of this thread's call."""
        deadline_s = getattr(self.times, "deadline_s", time.monotonic() + PATIENCE_S)
        if not self.lock.acquire(timeout=max(deadline_s - time.monotonic(), 0)):
            raise TimeoutError
        try:
            return client.ask(do, key, blob, deadline_s)
        finally:
            self.lock.release()

    def of(self, key: str) -> Client:
        return self.clients[blake2b(key.encode()).digest()[0] % len(self.clients)]

    def read(self, key: str) -> bytes | None:
        found: bytes | None = self.ask(self.of(key), "read", key)
        return found

    def write(self, key: str, blob: bytes) -> None:
        self.ask(self.of(key), "write", key, blob)

    def remove(self, key: str) -> None:
        """Forget a blob, if it is there."""
        self.ask(self.of(key), "remove", key)

    def names(self) -> Sequence[str]:
        return [name for one in self.clients for name in self.ask(one, "names")]

    def used(self) -> int:
        """Return the bytes that all blobs take."""
        return sum(self.ask(one, "used") for one in self.clients)


class ServerReference(MemoryReference):
    """The reference backend over servers; the setting `store` has their addresses."""

    name = "reference_server"
    durability = Scope.HOST
    sharing = Scope.HOST
    eviction = Support.NO
    retention = Support.EMULATED

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        """Return what asks the servers; nothing is connected yet."""
        ports = [int(one.rpartition(":")[2]) for one in settings.store.split(",")]
        return ServerShelf(tuple(Client(port) for port in ports))

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        """Do one batch; the shelf looks at its deadline."""
        assert isinstance(handle.shelf, ServerShelf)
        handle.shelf.times.deadline_s = batch.deadline_s
        return super().run(handle, batch)

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        """Do one key, unless its server is gone."""
        try:
            return super().step(handle, batch, row)
        except TimeoutError:
            return Outcome.TIMEOUT
        except OSError:
            return Outcome.UNAVAILABLE

    def retain(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        """Change the times of a key, unless its server is gone."""
        try:
            return super().retain(handle, batch, row)
        except OSError:
            return Outcome.UNAVAILABLE

    def close(self, handle: Handle) -> None:
        """Release a pool."""
        assert isinstance(handle.shelf, ServerShelf)
        for client in handle.shelf.clients:
            client.close()
        super().close(handle)


class ServerOracle(ShelfOracle):
    """Peeks and pokes on servers, and takes them away."""

    failing = Oracle.failing  # type: ignore[assignment] # it keeps no files
    shelf: ServerShelf

    def __init__(self, servers: Servers) -> None:
        super().__init__(ServerShelf(tuple(Client(port) for port in servers.ports)))
        self.servers = servers

    def close(self) -> None:
        for client in self.shelf.clients:
            client.close()

    def frozen(self) -> AbstractContextManager[None]:
        """Let the servers answer nothing."""
        return self.servers.frozen()

    def stopped(self) -> AbstractContextManager[None]:
        """Kill the servers, and start them again."""
        return self.servers.stopped(range(len(self.servers.ports)))

    def refusing(self) -> AbstractContextManager[None]:
        """Let the servers answer with errors."""
        return self.servers.refusing()

    def halved(self) -> AbstractContextManager[None]:
        """Kill one server of two."""
        return self.servers.stopped([0])


plugin = ServerReference()
