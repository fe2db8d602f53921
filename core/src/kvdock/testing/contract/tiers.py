"""The core over a chain of tiers, each a backend or an instance of one."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import uuid4

import attrs
import numpy as np
import pytest

from kvdock.batch import Operation, Outcome
from kvdock.config.core import CoreSettings, Deadlines
from kvdock.dock import Dock
from kvdock.errors import KvdockError
from kvdock.plugin.backend import Backend
from kvdock.plugin.instances import instance_of
from kvdock.plugin.manifest import Scope
from kvdock.pools.enums import HitPolicy, PoolKind
from kvdock.pools.shard import Shard
from kvdock.testing.cases import contract_test, plain_sample
from kvdock.testing.harness import PATIENCE_S
from kvdock.testing.loading import load_backend
from kvdock.testing.scale import Scale
from kvdock.testing.trial_engine import PAGES, SETTLE_S, TrialEngine, trial_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdock.arrays import OutcomeArray
    from kvdock.pools.spec import PoolSpec
    from kvdock.testing.oracles import Oracle
    from kvdock.transfer.attached_pool import AttachedPool
    from kvdock.transfer.placement import Placement

SOON_S = 5.0
"""How long a tier may take to find what was stored, or to report what is gone."""
POLLED_S = 2.5
"""How long to wait for reports that must not come; backends are asked each second."""


@attrs.frozen(eq=False)
class TieredTrial:
    """An engine whose pages are kept in tiers."""

    engine: TrialEngine
    scale: Scale

    @property
    def pool(self) -> AttachedPool:
        """Its pool."""
        return self.engine.cache[self.engine.memory.pool.name]

    @property
    def tiers(self) -> Sequence[Placement]:
        """The tiers of its pool, near first."""
        return self.pool.placements

    def store(self) -> None:
        """Store all pages, and wait for the copies."""
        stored = self.engine.cache.put(PAGES, self.engine.fill())
        assert stored.pages == len(PAGES), "not stored, although nothing failed"
        self.settle()

    def settle(self) -> None:
        """Wait for the copies that were asked for."""
        ended = self.engine.cache.wait_idle(self.scale.seconds(SETTLE_S))
        assert ended, "a copy between tiers does not end"

    def has(self, tier: Placement, pages: Sequence[str] = PAGES) -> int:
        """Return how many pages a tier has, right, asked without the others."""
        places, found = self.engine.blank(len(pages)), []
        for place, page in zip(places, pages, strict=True):
            _, lease = self.pool.leases.take(np.array([place]))
            until_s = time.monotonic() + self.scale.seconds(PATIENCE_S)
            get = (Operation.GET, [page], np.array([place]), until_s, lease)
            found.append(tier.move(*get, lambda: None))
        outcomes = cast("OutcomeArray", np.concatenate(found))
        self.engine.compare(pages, places, outcomes)
        return int(np.count_nonzero(outcomes == Outcome.OK))

    def has_soon(self, tier: Placement) -> int:
        """Return how many pages a tier has; it may take a moment."""
        end_s = time.monotonic() + self.scale.seconds(SOON_S)
        while (count := self.has(tier)) < len(PAGES) and time.monotonic() < end_s:
            time.sleep(0.01)
        return count

    def lose(self, tier: Placement, pages: Sequence[str] = PAGES) -> None:
        """Delete pages from one tier, or skip: a backend may refuse to."""
        until_s = time.monotonic() + self.scale.seconds(PATIENCE_S)
        if Outcome.REFUSED in tier.delete(pages, until_s).tolist():
            pytest.skip(f"{tier.backend} refuses to delete pages")


@attrs.frozen(eq=False)
class TieredHarness:
    """Attaches engines over the tiers under test."""

    dock: Dock
    settings: Mapping[str, Mapping[str, object]]
    pool: PoolSpec
    scale: Scale
    tidy: bool
    salt: str = attrs.field(factory=lambda: uuid4().hex)

    @contextmanager
    def engine(
        self,
        near: Mapping[str, object] | None = None,
        others: Mapping[str, object] | None = None,
        page_events: int = 0,
    ) -> Iterator[TieredTrial]:
        """Attach an engine, with rules of the nearest tier and of the others."""
        every = ("exists", "get", "put", "delete", "clear")
        patience_s = self.scale.seconds(PATIENCE_S)
        settled = trial_engine(
            self.dock,
            self.pool,
            self.settings,
            CoreSettings(
                deadlines=Deadlines(**dict.fromkeys(every, patience_s)),
                page_events=page_events,
            ),
            salt=self.salt,
            tiers=[
                {"backend": name, **((others if at else near) or {})}
                for at, name in enumerate(self.settings)
            ],
            settle_s=self.scale.seconds(SETTLE_S),
        )
        with settled as engine:
            yield TieredTrial(engine, self.scale)
            if self.tidy:
                engine.cache.clear()


def tiered_harness(
    tiers: Mapping[str, Mapping[str, object]],
    *,
    scale: Scale,
    tidy: bool,
    believed: bool,
) -> TieredHarness:
    """Load the tiers, and choose a pool that all of them take.

    Args:
        tiers: Tier name, near first, to its settings, with `plugin` where the name
            is that of an instance.
        scale: How slow they are.
        tidy: Whether to clear what was stored.
        believed: Whether the core takes the last tier's word for its bytes, as it
            does of a plugin that brings an oracle.

    Raises:
        KvdockError: If no pool can be kept in all of them.
    """
    words = {name: str(given.get("plugin", name)) for name, given in tiers.items()}
    loaded = {word: load_backend(word).plugin for word in words.values()}
    plugins = {name: instance_of(loaded[word], name) for name, word in words.items()}
    if believed:
        far = list(plugins)[-1]
        candidate = attrs.evolve(plugins[far].candidate, oracle="given")
        plugins[far] = attrs.evolve(plugins[far], candidate=candidate)
    dock = Dock({name: Backend(plugin) for name, plugin in plugins.items()})
    nearest = next(iter(dock.backends.values()))
    for kind in PoolKind:
        sample = plain_sample(nearest.manifest, kind)
        if kind is PoolKind.LOGICAL or sample.hit_policy is not HitPolicy.ALL_PAGES:
            continue
        pool = attrs.evolve(sample.pool(), anchor=True, required=True)
        try:
            plan = dock.plan([pool], Shard(), tiers=list(tiers), settings=tiers)
        except KvdockError:
            continue
        if len(plan.anchor.placements) == len(tiers):
            return TieredHarness(dock, tiers, pool, scale, tidy)
    raise KvdockError(f"no kind of pool can be kept in all of {', '.join(tiers)}")


class TierTests:
    """Tiers keep what was stored, each its own, and heal one another."""

    tiers: ClassVar[Sequence[str]]
    """The names of the tiers, near first; `config` has the settings of each."""

    @pytest.fixture
    def chain(
        self, config: Mapping[str, Mapping[str, object]], oracle: Oracle | None
    ) -> TieredHarness:
        """Load the tiers under test."""
        suite = cast("Any", type(self))
        given = {name: dict(config[name]) for name in suite.tiers}
        return tiered_harness(
            given,
            scale=Scale(suite.scale),
            tidy=suite.tidy,
            believed=oracle is not None,
        )

    @contract_test()
    def test_every_tier_gets_what_was_stored(self, chain: TieredHarness) -> None:
        with chain.engine() as trial:
            trial.store()
            for tier in trial.tiers:
                count = trial.has_soon(tier)
                assert count == len(PAGES), (
                    f"{tier.backend} has {count} of {len(PAGES)} pages after the copies"
                )

    @contract_test()
    def test_a_tier_answers_with_its_own_pages_alone(
        self, chain: TieredHarness
    ) -> None:
        with chain.engine(others={"write": "never"}) as trial:
            trial.store()
            for tier in trial.tiers[1:]:
                until_s = time.monotonic() + chain.scale.seconds(PATIENCE_S)
                there = int(np.count_nonzero(tier.find(PAGES, until_s)))
                assert not there, f"{tier.backend} finds pages of another tier"
                assert not trial.has(tier), f"{tier.backend} loads another's pages"

    @contract_test()
    def test_a_page_is_loaded_as_long_as_one_tier_has_it(
        self, chain: TieredHarness
    ) -> None:
        with chain.engine({"promote": "always"}, {"promote": "always"}) as trial:
            trial.store()
            for kept in trial.tiers:
                for tier in trial.tiers:
                    if tier is not kept:
                        trial.lose(tier)
                assert trial.engine.cache.exists(PAGES).best == len(PAGES)
                loaded = trial.engine.load(len(PAGES)).pages
                assert loaded == len(PAGES), f"lost, although {kept.backend} has them"
                trial.settle()
                assert trial.has(trial.tiers[0]) == len(PAGES), "not promoted"
                trial.store()

    @contract_test()
    def test_a_damaged_page_is_not_promoted(
        self, chain: TieredHarness, oracle: Oracle | None
    ) -> None:
        if oracle is None:
            pytest.skip("the author gives no oracle of the last tier")
        with chain.engine({"promote": "always"}, {"promote": "never"}) as trial:
            trial.store()
            for tier in trial.tiers[:-1]:
                trial.lose(tier)
            for key in trial.tiers[-1].keys(PAGES):
                data = oracle.peek(key)
                assert data is not None, "the oracle does not see what is stored"
                middle = len(data) // 2
                oracle.poke(key, middle, bytes([data[middle] ^ 1]))
            places = trial.engine.blank(len(PAGES))
            outcomes = trial.pool.get(PAGES, places)
            trial.engine.compare(PAGES, places, outcomes)
            trial.settle()
            assert not trial.has(trial.tiers[0]), "damaged pages were promoted"

    @contract_test()
    def test_no_tier_reports_a_removal_too_early(self, chain: TieredHarness) -> None:
        with chain.engine(page_events=1024) as trial:
            reporting = [one for one in trial.tiers if one.reports_removal]
            if not reporting:
                pytest.skip("no tier declares removed")
            trial.store()
            by_name = {one.backend: one for one in trial.tiers}
            gone: set[tuple[str, str]] = set()

            def take(wanted: int, soon_s: float = SOON_S) -> None:
                end_s = time.monotonic() + chain.scale.seconds(soon_s)
                while time.monotonic() < end_s and len(gone) < wanted:
                    for event in trial.engine.cache.take_page_events():
                        if event.stored:
                            continue
                        gone.update((event.backend, page) for page in event.hashes)
                        still = trial.has(by_name[event.backend], event.hashes)
                        assert not still, (
                            f"{event.backend} reports {still} pages gone that it has"
                        )
                    time.sleep(0.05)

            take(1, POLLED_S)
            assert not gone, "a removal is reported, and nothing was removed"
            for tier in reporting:
                trial.lose(tier, PAGES[:2])
                take(len(gone) + 2)
                assert {page for name, page in gone if name == tier.backend} == {
                    *PAGES[:2]
                }, f"{tier.backend} does not report which pages are gone"

    @contract_test()
    def test_clearing_reaches_every_tier(self, chain: TieredHarness) -> None:
        reach = {one.manifest.clear_reach for one in chain.dock.backends.values()}
        if reach != {Scope.NAMESPACE}:
            pytest.skip("not declared: clear_reach of each tier")
        with chain.engine() as trial:
            trial.store()
            cleared = trial.engine.cache.clear()
            assert set(cleared.values()) == {Outcome.OK}, cleared
            trial.settle()
            assert not any(trial.has(tier) for tier in trial.tiers)
