"""Any sequence of calls, against a dict that cannot be wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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

from kvdock.batches import Outcome
from kvdock.manifest import Scope
from kvdock.testing.cases import contract_test, one_sample
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from kvdock.testing.rigs import Harness, Rig

PAGES = page_hashes(6)
CHOICES = st.lists(st.sampled_from(range(len(PAGES))), min_size=1, max_size=6)


class StoreMachine(RuleBasedStateMachine):
    """Two handles of one store beside a dict from page to seed."""

    harness: Harness
    sample: Sample
    worlds = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.model = f"machine-{next(self.worlds)}"
        self.stored: dict[int, int] = {}
        shared = self.harness.backend.manifest.sharing is not Scope.NONE
        self.rigs = [self._attach() for _ in range(2 if shared else 1)]

    def _attach(self) -> Rig:
        return self.harness.rig(self.sample.pool(), model=self.model, pages=8)

    def _rig(self, which: int) -> Rig:
        return self.rigs[which % len(self.rigs)]

    @rule(which=st.integers(0, 1), chosen=CHOICES, seed=st.integers(0, 2))
    def put(self, which: int, chosen: Sequence[int], seed: int) -> None:
        """Store pages; what is there already keeps its bytes."""
        outcomes = self._rig(which).put([PAGES[i] for i in chosen], seed=seed)
        assert (outcomes == Outcome.OK).all(), outcomes.tolist()
        for index in chosen:
            self.stored.setdefault(index, seed)

    @rule(which=st.integers(0, 1), chosen=CHOICES)
    def get(self, which: int, chosen: Sequence[int]) -> None:
        """Load pages, those that were never stored among them."""
        rig = self._rig(which)
        for seed in sorted(set(self.stored.values())) or [0]:
            here = [i for i in chosen if self.stored.get(i, seed) == seed]
            outcomes = rig.get([PAGES[i] for i in here], seed=seed)
            for index, row in zip(here, outcomes, strict=True):
                assert bool((row == Outcome.OK).all()) == (index in self.stored), (
                    f"page {index}"
                )

    @rule(which=st.integers(0, 1), chosen=CHOICES)
    def delete(self, which: int, chosen: Sequence[int]) -> None:
        """Forget pages, where the backend can."""
        outcomes = self._rig(which).delete([PAGES[i] for i in chosen])
        if (outcomes != Outcome.REFUSED).all():
            for index in chosen:
                self.stored.pop(index, None)

    @precondition(lambda self: self._clears())
    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        """Forget all pages."""
        assert self._rig(which).clear() is Outcome.OK
        self.stored.clear()

    def _clears(self) -> bool:
        return self.harness.backend.manifest.clear_reach is not Scope.NONE

    @precondition(lambda self: len(self.rigs) > 1)
    @rule(which=st.integers(0, 1))
    def reattach(self, which: int) -> None:
        """Release one of the handles and attach anew."""
        at = which % len(self.rigs)
        self.rigs[at].release()
        self.harness.forget(self.rigs[at])
        self.rigs[at] = self._attach()

    @invariant()
    def found_is_what_is_stored(self) -> None:
        """Every handle finds what is stored, and nothing else."""
        for rig in self.rigs:
            found = rig.exists(PAGES).tolist()
            assert found == [index in self.stored for index in range(len(PAGES))]

    def teardown(self) -> None:
        """Let go of this run's handles."""
        for rig in self.rigs:
            rig.release()
            self.harness.forget(rig)


class MachineTests:
    """The store behaves like a dict, whatever is done in whatever order."""

    @contract_test(one_sample)
    def test_any_sequence_of_calls_agrees_with_a_dict(
        self, harness: Harness, case: Sample
    ) -> None:
        machine = type("Machine", (StoreMachine,), {"harness": harness, "sample": case})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=15,
                stateful_step_count=15,
                deadline=None,
                database=None,
                # The same runs every time: a report names what others can repeat.
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
