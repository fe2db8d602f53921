"""An engine of one pool over backends, whose every loaded page is compared."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from kvdock.batch import Outcome
from kvdock.namespace import Namespace
from kvdock.pools.layout import stored_objects
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements
from kvdock.testing.memory import PageMemory
from kvdock.testing.samples import page_hashes
from kvdock.transfer.attachment import Attachment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdock.arrays import OutcomeArray
    from kvdock.config.core import CoreSettings
    from kvdock.dock import Dock
    from kvdock.pools.spec import PoolSpec
    from kvdock.transfer.result import TransferResult

PAGES = page_hashes(8)

SETTLE_S = 30.0


@attrs.frozen(eq=False)
class TrialEngine:
    """An engine of one pool with memory for twice `PAGES`."""

    cache: Attachment
    memory: PageMemory

    def fill(self) -> dict[str, list[int]]:
        """Compute the pages of a prefix; return where they lie."""
        places = list(range(len(PAGES)))
        for place, page in zip(places, PAGES, strict=True):
            self.memory.write(place, page)
        return {self.memory.pool.name: places}

    def blank(self, count: int) -> list[int]:
        """Return blank places to load so many pages to."""
        self.memory.blank(len(PAGES), 2 * len(PAGES))
        return list(range(len(PAGES), len(PAGES) + count))

    def load(self, count: int) -> TransferResult:
        """Load a prefix into blank memory; assert that what is OK is right."""
        places = self.blank(count)
        moved = self.cache.get(PAGES[:count], {self.memory.pool.name: places})
        self.compare(PAGES[:count], places, moved.outcomes[self.memory.pool.name])
        return moved

    def compare(
        self, pages: Sequence[str], places: Sequence[int], outcomes: OutcomeArray
    ) -> None:
        """Assert that what is OK was loaded right."""
        pool, shard = self.memory.pool, self.memory.shard
        for place, page, outcome in zip(places, pages, outcomes.tolist(), strict=False):
            for stored in stored_objects(pool, shard) if outcome == Outcome.OK else ():
                assert self.memory.holds(place, page, stored), (
                    f"wrong bytes: page {place} was called loaded and is not"
                )


@contextmanager
def trial_engine(
    dock: Dock,
    pool: PoolSpec,
    settings: Mapping[str, Mapping[str, object]],
    core: CoreSettings,
    *,
    salt: str,
    tiers: Sequence[str | Mapping[str, object]] = (),
    settle_s: float = SETTLE_S,
) -> Iterator[TrialEngine]:
    """Attach backends to an engine of one pool, and detach them.

    Without tiers its pages go to the best backend. Calls and copies may take `settle_s`
    to end after the block.
    """
    needs = RouteRequirements(integrity=core.integrity)
    plan = dock.plan([pool], Shard(), tiers=tiers, needs=needs, settings=settings)
    memory = PageMemory.of(plan.anchor.pool, Shard(), 2 * len(PAGES))
    cache = Attachment.open(
        dock,
        plan,
        Namespace(model="trial", salt=salt),
        {pool.name: memory.region()},
        settings,
        core=core,
    )
    try:
        yield TrialEngine(cache, memory)
        assert cache.wait_idle(settle_s), "a call is still running"
    finally:
        cache.close()
