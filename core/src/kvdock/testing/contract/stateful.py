"""Compare any sequence of calls with a dict."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvdock.batch import Outcome
from kvdock.plugin.manifest import Scope
from kvdock.testing.cases import contract_test, one_sample
from kvdock.testing.harness import spelled
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.testing.harness import Harness, Setup

PAGES = page_hashes(6)
CHOICES = st.lists(st.sampled_from(range(len(PAGES))), min_size=1, max_size=6)


class Found(Enum):
    """The answers that a handle may give about a page."""

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"
    """Another handle deleted it; this one may still find it for a while."""


class StoreMachine(RuleBasedStateMachine):
    """Two handles of one store, and what each of them must find.

    Pages are content-addressed, as an engine's are: whatever a handle finds
    has the right bytes, and `Rig.get` asserts that.
    """

    harness: Harness
    sample: Sample
    worlds = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.model = f"machine-{next(self.worlds)}"
        shared = self.harness.backend.manifest.sharing is not Scope.NONE
        self.rigs = [self._attach() for _ in range(2 if shared else 1)]
        self.found = [[Found.NO] * len(PAGES) for _ in self.rigs]

    def _attach(self) -> Setup:
        return self.harness.rig(self.sample.pool(), model=self.model, pages=8)

    @rule(which=st.integers(0, 1), chosen=CHOICES)
    def put(self, which: int, chosen: Sequence[int]) -> None:
        """Store pages, those that are there already among them."""
        at = which % len(self.rigs)
        outcomes = self.rigs[at].put([PAGES[page] for page in chosen])
        assert (outcomes == Outcome.OK).all(), spelled(outcomes)
        for page in chosen:
            sure = all(row[page] is not Found.MAYBE for row in self.found)
            for row in self.found:
                row[page] = Found.YES if sure else Found.MAYBE
            self.found[at][page] = Found.YES

    @rule(which=st.integers(0, 1), chosen=CHOICES)
    def get(self, which: int, chosen: Sequence[int]) -> None:
        """Load pages, those that were never stored among them."""
        at = which % len(self.rigs)
        outcomes = self.rigs[at].get([PAGES[page] for page in chosen])
        for page, row in zip(chosen, outcomes, strict=True):
            self._check(at, page, found=bool((row == Outcome.OK).all()))

    @rule(which=st.integers(0, 1), chosen=CHOICES)
    def delete(self, which: int, chosen: Sequence[int]) -> None:
        """Delete pages, where the backend can."""
        at = which % len(self.rigs)
        outcomes = self.rigs[at].delete([PAGES[page] for page in chosen])
        if (outcomes != Outcome.REFUSED).all():
            self._forgotten(at, chosen)

    @precondition(
        lambda self: self.harness.backend.manifest.clear_reach is not Scope.NONE
    )
    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        """Delete all pages."""
        at = which % len(self.rigs)
        assert self.rigs[at].clear() is Outcome.OK, "clear failed"
        self._forgotten(at, range(len(PAGES)))

    def _forgotten(self, at: int, pages: Sequence[int]) -> None:
        for page in pages:
            for row in self.found:
                row[page] = Found.NO if row[page] is Found.NO else Found.MAYBE
            self.found[at][page] = Found.NO

    @precondition(lambda self: len(self.rigs) > 1)
    @rule(which=st.integers(0, 1))
    def reattach(self, which: int) -> None:
        """Release one of the handles and attach it again."""
        at, other = which % 2, 1 - which % 2
        self.rigs[at].release()
        self.harness.forget(self.rigs[at])
        self.rigs[at] = self._attach()
        for page, known in enumerate(self.found[other]):
            agreed = known is self.found[at][page]
            self.found[at][page] = known if agreed else Found.MAYBE

    @invariant()
    def every_handle_finds_what_it_must(self) -> None:
        """Ask every handle for every page."""
        for at, setup in enumerate(self.rigs):
            sure = [
                page for page, known in enumerate(self.found[at]) if known is Found.YES
            ]
            # What the other handle stored may take a moment.
            setup.exists_soon([PAGES[page] for page in sure])
            for page, found in enumerate(setup.exists(PAGES).tolist()):
                self._check(at, page, found=found)

    def _check(self, at: int, page: int, *, found: bool) -> None:
        known = self.found[at][page]
        assert known is Found.MAYBE or found == (known is Found.YES), (
            f"page {page} is {'' if found else 'not '}found"
        )

    def teardown(self) -> None:
        """Release the handles of this run."""
        for setup in self.rigs:
            setup.release()
            self.harness.forget(setup)


class MachineTests:
    """The store behaves like a dict under any sequence of calls."""

    @contract_test(one_sample, slow=True)
    def test_any_sequence_of_calls_agrees_with_a_dict(
        self, harness: Harness, case: Sample
    ) -> None:
        machine = type("Machine", (StoreMachine,), {"harness": harness, "sample": case})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=harness.scale.count(15, least=4),
                stateful_step_count=harness.scale.count(15, least=8),
                deadline=None,
                database=None,
                # The same runs every time: a report names what others can repeat.
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
