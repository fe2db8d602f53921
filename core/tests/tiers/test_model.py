"""Random engines' lives over tiers, beside a model of what must be there.

The model knows for each tier the pages that it must have, and those that it may have:
a copy that was asked for may have been made, or not yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from shelf import Shelf, attention, hashes, patient, states
from tiered import Tiers

from kvdock.batch import BatchResult, Outcome

NAMES = hashes(8)
SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True)
TIER = st.integers(0, 2)
WRITE = st.sampled_from(["through", "behind", "never"])
PROMOTE = st.sampled_from(["always", "second", "never"])


class LifeInTiers(RuleBasedStateMachine):
    """Three tiers with drawn rules, and everything that may happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.shelves = [Shelf(name) for name in ("near", "disk", "far")]
        self.put: set[str] = set()
        self.tiers: Tiers | None = None

    @initialize(
        writes=st.tuples(st.sampled_from(["through", "behind"]), WRITE, WRITE),
        promotes=st.tuples(PROMOTE, PROMOTE, PROMOTE),
    )
    def begin(self, writes: tuple[str, ...], promotes: tuple[str, ...]) -> None:
        self.given: list[dict[str, Any]] = [
            {"backend": shelf.name, "write": write, "promote": promote}
            for shelf, write, promote in zip(
                self.shelves, writes, promotes, strict=True
            )
        ]
        self.start()

    def start(self) -> None:
        # Small rows, so that copies and loads take several chunks.
        core = patient(tiers={"batch_bytes": 2000}, breaker={"failures": 1000})
        self.tiers = Tiers(
            self.shelves, tiers=self.given, pools=(attention(), states()), core=core
        )

    @property
    def live(self) -> Tiers:
        assert self.tiers
        return self.tiers

    @rule(names=SOME)
    def store(self, names: list[str]) -> None:
        working = [shelf for shelf in self.shelves if shelf.trouble is None]
        written = [
            shelf
            for shelf, given in zip(self.shelves, self.given, strict=True)
            if given["write"] != "never" and shelf in working
        ]
        stored = self.live.put(names, list(range(len(names))))
        assert stored == (len(names) if written else 0)
        if written:
            self.put.update(names)

    @rule(names=SOME)
    def load(self, names: list[str]) -> None:
        # `get` compares the bytes of each page that counts as loaded.
        pages = list(range(10, 10 + len(names)))
        found = self.live.get(names, pages)
        assert found <= len(names)

    @rule(names=SOME)
    def look(self, names: list[str]) -> None:
        found = self.live.cache["kv"].exists(names)
        for name, there in zip(names, found.tolist(), strict=True):
            assert not there or name in self.put, "it was never stored"

    @rule(tier=TIER, names=SOME)
    def evict(self, tier: int, names: list[str]) -> None:
        self.live.settle()
        objects = self.shelves[tier].objects
        for key in [key for key in objects if any(name in key for name in names)]:
            del objects[key]

    @rule(tier=TIER, name=st.sampled_from(NAMES))
    def damage(self, tier: int, name: str) -> None:
        self.live.settle()
        objects = self.shelves[tier].objects
        for key in [key for key in objects if name in key]:
            objects[key] = bytes([objects[key][0] ^ 1]) + objects[key][1:]

    @rule(tier=TIER)
    def wipe(self, tier: int) -> None:
        self.live.settle()
        self.shelves[tier].objects.clear()

    @rule(
        tier=TIER,
        outcome=st.sampled_from([Outcome.ERROR, Outcome.REFUSED, Outcome.UNAVAILABLE]),
    )
    def fail(self, tier: int, outcome: Outcome) -> None:
        self.live.settle()
        self.shelves[tier].trouble = lambda batch: BatchResult.all(batch, outcome)

    @rule()
    def heal(self) -> None:
        for shelf in self.shelves:
            shelf.trouble = None

    @rule()
    def clear(self) -> None:
        self.heal()
        outcomes = self.live.cache.clear()
        assert set(outcomes.values()) == {Outcome.OK}
        self.live.settle()
        assert not any(shelf.objects for shelf in self.shelves)
        self.put.clear()

    @rule(order=st.permutations(range(3)))
    def restart(self, order: list[int]) -> None:
        """Start again, with the tiers in another order."""
        assert self.live.cache.close()
        self.shelves = [self.shelves[at] for at in order]
        self.given = [self.given[at] for at in order]
        self.start()

    @precondition(lambda self: all(one.trouble is None for one in self.shelves))
    @rule()
    def whole_pages_are_found_and_loaded(self) -> None:
        self.live.settle()
        for name in NAMES:
            whole = any(self.has_whole(tier, name) for tier in range(3))
            found = self.live.cache["kv"].get([name], [20])
            assert bool(found[0] == Outcome.OK) is whole
            if whole:
                self.live.check("kv", name, 20)

    def has_whole(self, tier: int, name: str) -> bool:
        content = self.live.content("kv", name).tobytes()
        objects = self.shelves[tier].objects
        found = [one for key, one in objects.items() if f"{name}.kv." in key]
        # The page lies in front of its trailer.
        return bool(found) and found[0].startswith(content)

    @invariant()
    def copies_are_bounded(self) -> None:
        if self.tiers is not None:
            copier = self.tiers.cache._backends.copier
            assert copier
            assert copier._queued_bytes >= 0

    def teardown(self) -> None:
        if self.tiers is not None:
            self.heal()
            self.live.settle()
            # A page that was only asked for, or is gone, leaves nothing behind.
            copier = self.live.cache._backends.copier
            assert copier
            assert copier._queued_bytes == 0
            assert not copier._waiting
            assert self.live.cache.close()
        assert np.all([not shelf.inside for shelf in self.shelves])


TestLifeInTiers = LifeInTiers.TestCase
TestLifeInTiers.settings = settings(
    max_examples=15,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
