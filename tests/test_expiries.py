"""Pages that expire by the thousand: none is served late, and none is left on disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
from shelf import Shelf, patient

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.batch import Outcome
from kvdock.pools import Part
from kvdock.retention import RetentionAnswer

LARGE = "TESTS_OF_KVDOCK_TORTURE" in os.environ
PAGES = 100_000 if LARGE else 3_000
BATCH = 1000
PAGE_BYTES = 512
GONE_S = 60.0
"""How long bytes may stay after their time."""
MARK = b"expires!"
POOL = PoolSpec(
    name="kv",
    kind="k_only",
    parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
    layers=[0],
    page_tokens=16,
    anchor=True,
)


@attrs.define(eq=False)
class Batches:
    """Pages by batches, over one tier that keeps times and one that does not."""

    root: Path
    cache: Attachment = attrs.field(init=False)
    ends: list[float] = attrs.field(factory=list)
    memory: np.ndarray = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        # Each page holds the mark in all of its bytes, and nothing else does.
        page = np.frombuffer(MARK * (PAGE_BYTES // len(MARK)), np.uint8)
        self.memory = np.tile(page, (2 * BATCH, 1))
        given = {"file": {"root": str(self.root), "free_space": "1 MiB"}}
        loaded = Dock.load(only=["file"], settings=given, environ={})
        dock = Dock({**loaded.backends, "far": Shelf("far").backend()})
        plan = dock.plan([POOL], Shard(), tiers=["file", "far"])
        regions = {"kv": Region.of(POOL, Shard(), [self.memory], 2 * BATCH)}
        core = patient(retention={"erase_within": "10 s"})
        self.cache = Attachment.open(
            dock, plan, Namespace(model="m"), regions, given, core=core
        )

    def hashes(self, batch: int) -> list[str]:
        return [f"{batch * BATCH + at:016x}" for at in range(BATCH)]

    def put(self, batch: int, seconds: float) -> None:
        stored = self.cache.put(
            self.hashes(batch), {"kv": range(BATCH)}, expire_s=seconds
        )
        assert stored.pages == BATCH
        assert stored.retained is not None
        assert (stored.retained == RetentionAnswer.ACCEPTED).all()
        self.ends.append(time.time() + seconds)

    def served(self, batch: int) -> tuple[int, bool]:
        """Return how many pages are loaded, and whether they may be."""
        began_s = time.time()
        found = self.cache.get(self.hashes(batch), {"kv": range(BATCH, 2 * BATCH)})
        count = int(np.count_nonzero(found.outcomes["kv"] == Outcome.OK))
        return count, began_s < self.ends[batch]


def marked(root: Path) -> int:
    """Return how many files hold the bytes of a page."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return sum(MARK in path.read_bytes() for path in files)


@pytest.mark.slow
def test_no_page_is_served_after_its_time_and_no_byte_of_it_is_left(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    batches = Batches(root)
    rng = np.random.default_rng(3)
    late = served = 0
    try:
        for number in range(PAGES // BATCH):
            batches.put(number, float(rng.uniform(1, 8)))
            some, may = batches.served(int(rng.integers(number + 1)))
            served += some
            late += 0 if may else some
        assert batches.cache.wait_idle(60)
        assert marked(root)
        while time.time() < max(batches.ends):
            some, may = batches.served(int(rng.integers(len(batches.ends))))
            served += some
            late += 0 if may else some
        for number in range(len(batches.ends)):
            late += batches.served(number)[0]
            # What keeps times itself does not even find them.
            near = batches.cache["kv"].placements[0]
            there = near.find(batches.hashes(number), time.monotonic() + 60)
            assert not there.any()
        assert served > PAGES / 20
        assert late == 0
        end_s = max(batches.ends) + GONE_S
        while marked(root) and time.time() < end_s:
            time.sleep(0.2)
        assert marked(root) == 0
    finally:
        batches.cache.close()
