"""Read from an owner that is frozen, then give the pages to another request.

Usage: python late_writes.py PAGES PAGE_BYTES LIMITS LENT_BYTES FROZEN_S

LIMITS says what protects the pages:
    plugin    the plugin's timeouts and calls that end in time, and leases
    library   leases alone: the library's own timeouts, calls of 1024 pieces
    none      nothing: what the library gave up counts as ended

Prints one line of JSON; `changed` counts the rows that another request had been
given and that differ from its bytes after the owner has gone on.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import attrs
import numpy as np

from kvdock import Attachment, Dock, MemoryHold, Namespace, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part
from kvdock_mooncake.held_memory import HeldMemory
from kvdock_mooncake.server import Server, start_master, start_owner

WATCHED_S = 15.0
"""How long late bytes are waited for after the owner has gone on."""

CLOSE_AT_S = 64.0
"""The library has given every call up by then."""

OTHER = 10_000
"""Number of the first page of the other request."""


def page(number: int, nbytes: int) -> Any:
    """Return the bytes of a page, which follow from its number."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


@attrs.define(eq=False)
class Engine:
    """An attachment, its memory, and the rows that another request was given."""

    attachment: Attachment
    memory: Any
    given: Any

    @classmethod
    def attach(cls, memory: Any, settings: dict[str, object]) -> Engine:
        pages, page_bytes = memory.shape
        pool = PoolSpec(
            name="kv", kind="mla", parts=(Part("kv", "u8", (page_bytes,)),),
            layers=range(1), page_tokens=1, anchor=True,
        )  # fmt: skip
        region = Region.of(pool, Shard(), (memory,), pages)
        dock = Dock.load(require=("mooncake",))
        plan = dock.plan([pool], Shard(), ("mooncake",))
        core = structure(
            CoreSettings, {"deadlines": {"put": "30 s"}}, where="late writes"
        )
        attachment = Attachment.open(
            dock, plan, Namespace(model="late"), {"kv": region},
            {"mooncake": settings}, core=core,
        )  # fmt: skip
        return cls(attachment, memory, np.zeros(pages, np.bool_))

    @property
    def where(self) -> dict[str, Any]:
        return {"kv": np.arange(len(self.memory))}

    @property
    def hashes(self) -> list[str]:
        rows = range(len(self.memory))
        return [hashlib.sha256(f"{row}".encode()).hexdigest() for row in rows]

    def put(self) -> None:
        for row in range(len(self.memory)):
            self.memory[row] = page(row, self.memory.shape[1])
        moved = self.attachment.put(self.hashes, self.where)
        assert moved.pages == len(self.memory), moved.outcomes

    def get(self) -> int:
        self.memory[:] = 0
        return self.attachment.get(self.hashes, self.where).pages

    def give_away(self, free: Any) -> None:
        """Give rows that are free to another request, once each."""
        for row in np.flatnonzero(free & ~self.given).tolist():
            self.memory[row] = page(OTHER + row, self.memory.shape[1])
            self.given[row] = True

    def changed(self) -> int:
        return sum(
            not np.array_equal(
                self.memory[row], page(OTHER + row, self.memory.shape[1])
            )
            for row in np.flatnonzero(self.given).tolist()
        )


def freeze_under_a_read(
    engine: Engine, owner: Server, frozen_s: float
) -> dict[str, Any]:
    """Freeze the owner, read, reuse what becomes free, and let it go on."""
    leases = engine.attachment.leases("kv")
    rows = np.arange(len(engine.memory))
    assert engine.get() == len(rows)
    owner.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    found: dict[str, Any] = {"loaded": engine.get(), "free_after_s": None}
    closed: bool | None = None
    while (now_s := time.monotonic() - began) < frozen_s:
        if closed is None and now_s > CLOSE_AT_S:
            found["leased"] = int(leases.in_use(rows).sum())
            closed = found["closed"] = engine.attachment.close()
        free = np.ones(len(rows), np.bool_) if closed else ~leases.in_use(rows)
        if free.all() and found["free_after_s"] is None:
            found["free_after_s"] = round(now_s, 1)
        engine.give_away(free)
        time.sleep(0.1)
    owner.process.send_signal(signal.SIGCONT)
    until = time.monotonic() + WATCHED_S
    while time.monotonic() < until and not engine.changed():
        time.sleep(0.5)
    return found | {"given": int(engine.given.sum()), "changed": engine.changed()}


def trial(memory: Any, limits: str, lent: int, frozen_s: float) -> dict[str, Any]:
    """Start a cluster, store pages in its owner, and freeze it."""
    if limits != "plugin":
        for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
            os.environ[name] = "30"
        os.environ["MC_TCP_LANES_PER_PEER"] = "4"
    if limits == "none":
        HeldMemory.add = _not_held  # type: ignore[method-assign]  # no protection
    servers = [start_master("-default_kv_lease_ttl=200000", "-client_ttl=600")]
    try:
        servers.append(start_owner(servers[0].address, 256 << 20))
        settings: dict[str, object] = {
            "master": servers[0].address, "segment_bytes": 0, "lease_s": 200,
            "client_ttl_s": 600, "max_pieces": 0 if limits == "plugin" else 1024,
        }  # fmt: skip
        writer = Engine.attach(memory.copy(), settings)
        writer.put()
        writer.attachment.close()
        reader = Engine.attach(memory, settings | {"segment_bytes": lent})
        return freeze_under_a_read(reader, servers[1], frozen_s)
    finally:
        for server in reversed(servers):
            server.process.send_signal(signal.SIGCONT)
            server.stop()


def _not_held(self: HeldMemory, nbytes: int) -> MemoryHold:
    del self, nbytes
    hold = MemoryHold()
    hold.release()
    return hold


def main(pages: str, page_bytes: str, limits: str, lent: str, frozen_s: str) -> None:
    """Run one trial; the process is left without the library's destructors."""
    memory = np.zeros((int(pages), int(page_bytes)), np.uint8)
    found = trial(memory, limits, int(lent), float(frozen_s))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
