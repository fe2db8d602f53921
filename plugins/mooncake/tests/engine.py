"""An engine process whose draft is registered late: stores, or restores.

Usage: python engine.py MASTER put|get. Says in one line of JSON what it found.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import attrs
import numpy as np

from kvdock import Attachment, Dock, Namespace, Outcome, PoolSpec, Region, Shard
from kvdock.pools import Part

PAGES = 24
TARGET = PoolSpec(
    name="kv",
    kind="mla",
    parts=(Part("kv", "bf16", (64,)),),
    layers=range(4),
    page_tokens=16,
    anchor=True,
)
DRAFT = PoolSpec(
    name="draft",
    kind="mha",
    parts=tuple(Part(name, "bf16", (2, 16), shard_axis=0) for name in ("k", "v")),
    layers=range(1),
    page_tokens=16,
    draft=True,
    anchor=True,
    layout="page_first_direct",
)
HASHES = [hashlib.sha256(f"page {n}".encode()).hexdigest() for n in range(PAGES)]


@attrs.frozen(eq=False)
class Pool:
    """One pool with memory, attached by itself."""

    attachment: Attachment
    memory: Any
    wanted: Any
    name: str

    @classmethod
    def attach(cls, pool: PoolSpec, space: Namespace, master: str) -> Pool:
        nbytes = PAGES * pool.page_bytes(Shard())
        seed = 1 + pool.draft
        wanted = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        memory = wanted.copy()
        parts = tuple(np.split(memory, len(pool.parts)))
        region = Region.of(pool, Shard(), parts, PAGES)
        dock = Dock.load(require=("mooncake",))
        plan = dock.plan([pool], Shard(), ("mooncake",))
        settings = {"mooncake": {"master": master, "segment_bytes": 0, "lease_s": 0.5}}
        attachment = Attachment.open(dock, plan, space, {pool.name: region}, settings)
        return cls(attachment, memory, wanted, pool.name)

    @property
    def client(self) -> int:
        (attached,) = self.attachment.pools_by_name.values()
        handle: Any = attached.handle
        return id(handle.client)

    def move(self, what: str) -> dict[str, object]:
        """Put or get all pages; say how many were there and came right."""
        places = {self.name: np.arange(PAGES)}
        found = self.attachment.exists(HASHES).best
        if what == "put":
            moved = self.attachment.put(HASHES, places)
        else:
            self.memory[:] = 0
            moved = self.attachment.get(HASHES, places)
        good = int((moved.outcomes[self.name] == Outcome.OK).sum())
        same = bool(np.array_equal(self.memory, self.wanted))
        return {"found": found, "good": good, "same": same}


def main(master: str, what: str) -> None:
    """Attach the target, work with it, attach the draft, work with both."""
    space = Namespace(model="a target", draft_model="a draft")
    target = Pool.attach(TARGET, space, master)
    first = target.move(what)
    other = attrs.evolve(space, page_format=f"beside {target.attachment.namespace}")
    draft = Pool.attach(DRAFT, other, master)
    found: dict[str, object] = {
        "target": first,
        "draft": draft.move(what),
        "again": target.move("get"),
        "clients": len({one.client for one in (target, draft)}),
    }
    draft.attachment.close()
    target.attachment.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
