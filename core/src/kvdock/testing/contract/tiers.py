"""The core over a chain of tiers, each a backend or an instance of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import uuid4

import attrs
import numpy as np
import pytest

from kvdock.batch import Operation, Outcome
from kvdock.config.core import CoreSettings, Deadlines
from kvdock.dock import Dock
from kvdock.plugin.backend import Backend
from kvdock.plugin.instances import instance_of
from kvdock.testing.cases import contract_test, one_sample
from kvdock.testing.harness import PATIENCE_S, becomes
from kvdock.testing.loading import load_backend
from kvdock.testing.scale import Scale
from kvdock.testing.trial_engine import PAGES, SETTLE_S, TrialEngine, trial_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvdock.arrays import OutcomeArray
    from kvdock.testing.oracles import Oracle
    from kvdock.transfer.attached_pool import AttachedPool
    from kvdock.transfer.placement import Placement

SOON_S = 5.0
"""How long a tier may take to find what was stored, or to report what is gone."""
POLLED_S = 2.5
"""How long to wait for reports that must not come; backends are asked each second."""


Rules = Mapping[str, object]
Attach = Callable[..., "AbstractContextManager[TieredTrial]"]
"""From rules of the nearest tier, and of the others, to an engine."""


@attrs.frozen(eq=False)
class TieredTrial(TrialEngine):
    """An engine whose pages are kept in tiers."""

    scale: Scale

    @property
    def pool(self) -> AttachedPool:
        """Its pool."""
        return self.cache[self.memory.pool.name]

    @property
    def tiers(self) -> Sequence[Placement]:
        """The tiers of its pool, near first."""
        return self.pool.placements

    def store(self) -> None:
        """Store all pages, and wait for the copies."""
        stored = self.cache.put(PAGES, self.fill())
        assert stored.pages == len(PAGES), "not stored, although nothing failed"
        self.settle()

    def settle(self) -> None:
        """Wait for the copies that were asked for."""
        ended = self.cache.wait_idle(self.scale.seconds(SETTLE_S))
        assert ended, "a copy between tiers does not end"

    def has(self, tier: Placement, pages: Sequence[str] = PAGES) -> int:
        """Return how many pages a tier has, right, asked without the others."""
        places, found = self.blank(len(pages)), []
        for place, page in zip(places, pages, strict=True):
            until_s = time.monotonic() + self.scale.seconds(PATIENCE_S)
            found.append(
                self.pool.transfer_in(
                    tier, Operation.GET, [page], np.array([place]), until_s
                )
            )
        outcomes = cast("OutcomeArray", np.concatenate(found))
        self.compare(pages, places, outcomes)
        return int(np.count_nonzero(outcomes == Outcome.OK))

    def has_soon(self, tier: Placement) -> int:
        """Return how many pages a tier has; it may take a moment."""
        becomes(lambda: self.has(tier) == len(PAGES), self.scale.seconds(SOON_S))
        return self.has(tier)

    def lose(self, tier: Placement, pages: Sequence[str] = PAGES) -> None:
        """Delete pages from one tier, or skip: a backend may refuse to."""
        until_s = time.monotonic() + self.scale.seconds(PATIENCE_S)
        if Outcome.REFUSED in tier.delete(pages, until_s).tolist():
            pytest.skip(f"{tier.backend} refuses to delete pages")


class TierTests:
    """Tiers keep what was stored, each its own, and heal one another."""

    tiers: ClassVar[Sequence[str]]
    """The names of the tiers, near first; `config` has the settings of each."""

    @pytest.fixture
    def attach(
        self, config: Mapping[str, Mapping[str, object]], oracle: Oracle | None
    ) -> Attach:
        """Load the tiers; return what attaches an engine with rules for them.

        The core takes the last tier's word for its bytes where an oracle is given, as
        it does of a plugin with a report.
        """
        suite = cast("Any", type(self))
        scale, salt = Scale(suite.scale), uuid4().hex
        given = {name: dict(config[name]) for name in suite.tiers}
        words = {name: str(own.get("plugin", name)) for name, own in given.items()}
        loaded = {word: load_backend(word).plugin for word in words.values()}
        plugins = {name: instance_of(loaded[one], name) for name, one in words.items()}
        if oracle is not None:
            far = plugins[suite.tiers[-1]]
            plugins[suite.tiers[-1]] = attrs.evolve(far, believed=True)
        dock = Dock({name: Backend(plugin) for name, plugin in plugins.items()})
        (sample,) = one_sample(dock.backends[suite.tiers[0]].manifest)
        if sample.skip:
            pytest.skip(sample.skip)
        pool = attrs.evolve(sample.value.pool(), anchor=True, required=True)
        every = ("exists", "get", "put", "delete", "clear")
        patience = Deadlines(**dict.fromkeys(every, scale.seconds(PATIENCE_S)))

        @contextmanager
        def engine(
            near: Rules | None = None, others: Rules | None = None, page_events: int = 0
        ) -> Iterator[TieredTrial]:
            rules = [
                {"backend": name, **((others if at else near) or {})}
                for at, name in enumerate(suite.tiers)
            ]
            core = CoreSettings(deadlines=patience, page_events=page_events)
            settle_s = scale.seconds(SETTLE_S)
            with trial_engine(
                dock, pool, given, core, salt=salt, tiers=rules, settle_s=settle_s
            ) as found:
                yield TieredTrial(found.cache, found.memory, scale)
                if suite.tidy:
                    found.cache.clear()

        return engine

    @contract_test()
    def test_every_tier_gets_what_was_stored(self, attach: Attach) -> None:
        with attach() as trial:
            trial.store()
            for tier in trial.tiers:
                count = trial.has_soon(tier)
                assert count == len(PAGES), (
                    f"{tier.backend} has {count} of {len(PAGES)} pages after the copies"
                )

    @contract_test()
    def test_a_tier_answers_with_its_own_pages_alone(self, attach: Attach) -> None:
        with attach(others={"write": "never"}) as trial:
            trial.store()
            for tier in trial.tiers[1:]:
                until_s = time.monotonic() + trial.scale.seconds(PATIENCE_S)
                there = int(np.count_nonzero(tier.find(PAGES, until_s)))
                assert not there, f"{tier.backend} finds pages of another tier"
                assert not trial.has(tier), f"{tier.backend} loads another's pages"

    @contract_test()
    def test_a_page_is_loaded_as_long_as_one_tier_has_it(self, attach: Attach) -> None:
        with attach({"promote": "always"}, {"promote": "always"}) as trial:
            trial.store()
            for kept in trial.tiers:
                for tier in trial.tiers:
                    if tier is not kept:
                        trial.lose(tier)
                assert trial.cache.exists(PAGES).best == len(PAGES)
                loaded = trial.load(len(PAGES)).pages
                assert loaded == len(PAGES), f"lost, although {kept.backend} has them"
                trial.settle()
                assert trial.has(trial.tiers[0]) == len(PAGES), "not promoted"
                trial.store()

    @contract_test()
    def test_a_damaged_page_is_not_promoted(
        self, attach: Attach, oracle: Oracle | None
    ) -> None:
        if oracle is None:
            pytest.skip("the author gives no oracle of the last tier")
        with attach({"promote": "always"}, {"promote": "never"}) as trial:
            trial.store()
            for tier in trial.tiers[:-1]:
                trial.lose(tier)
            for key in trial.tiers[-1].keys(PAGES):
                data = oracle.peek(key)
                assert data is not None, "the oracle does not see what is stored"
                middle = len(data) // 2
                oracle.poke(key, middle, bytes([data[middle] ^ 1]))
            places = trial.blank(len(PAGES))
            outcomes = trial.pool.get(PAGES, places)
            trial.compare(PAGES, places, outcomes)
            trial.settle()
            assert not trial.has(trial.tiers[0]), "damaged pages were promoted"

    @contract_test()
    def test_no_tier_reports_a_removal_too_early(self, attach: Attach) -> None:
        with attach(page_events=1024) as trial:
            reporting = [one for one in trial.tiers if one.reports_removal]
            if not reporting:
                pytest.skip("no tier declares removed")
            trial.store()
            by_name = {one.backend: one for one in trial.tiers}
            gone: set[tuple[str, str]] = set()

            def take(wanted: int, soon_s: float = SOON_S) -> None:
                end_s = time.monotonic() + trial.scale.seconds(soon_s)
                while time.monotonic() < end_s and len(gone) < wanted:
                    for event in trial.cache.take_page_events():
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
