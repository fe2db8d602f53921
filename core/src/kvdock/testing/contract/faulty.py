"""The core over the backend while faults are injected between the two."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from kvdock.config.core import CoreSettings, Deadlines, Integrity
from kvdock.dock import Dock
from kvdock.plugin.backend import Backend
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Scope
from kvdock.plugin.wrapper import wrapped_plugin
from kvdock.pools.enums import HitPolicy
from kvdock.testing.cases import Case, contract_test, one_sample
from kvdock.testing.harness import PATIENCE_S, Harness, becomes
from kvdock.testing.loading import load_backend
from kvdock.testing.trial_engine import PAGES, SETTLE_S, TrialEngine, trial_engine
from kvdock.wrappers.faults import Fault, FaultInjector, FaultSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvdock.plugin.manifest import Manifest
    from kvdock.testing.samples import Sample

DEADLINE_S = 0.5
LATE_S = 5.0
"""How much later than its deadline a call may end on a busy machine."""

SOON_S = 5.0
"""How long what was stored may take to be found again after a fault."""

UNANSWERED = frozenset({Fault.ERROR, Fault.DROP, Fault.HANG, Fault.LATE, Fault.GARBLE})
"""Faults of which the core gets no answer that it may believe."""

SPOILING = frozenset({Fault.SHORT, Fault.CORRUPT, Fault.SWAP, Fault.LIE})
"""Faults that alter loaded bytes; the core then drops the page it came from."""


def one_anchor(manifest: Manifest) -> Case:
    """Return a pool that can be an anchor, or the reason why there is none."""
    (plain,) = one_sample(manifest)
    if not plain.skip and plain.value.hit_policy is not HitPolicy.ALL_PAGES:
        return attrs.evolve(plain, skip="none of its pools can be an anchor")
    return plain


def every_fault(manifest: Manifest) -> Iterable[Case]:
    """Run for each fault, with a pool that can be an anchor."""
    plain = one_anchor(manifest)
    for fault in Fault:
        yield Case(str(fault), (fault, plain.value), plain.skip)


@contextmanager
def engine_of(
    harness: Harness, dock: Dock, sample: Sample, deadline_s: float = PATIENCE_S
) -> Iterator[TrialEngine]:
    """Attach the backend of a harness to an engine of one pool, with trailers."""
    core = CoreSettings(
        integrity=Integrity.ALWAYS,
        deadlines=Deadlines(
            exists=deadline_s, get=deadline_s, put=deadline_s, clear=deadline_s
        ),
    )
    pool = attrs.evolve(sample.pool(), anchor=True)
    settings = dict.fromkeys(dock.backends, harness.settings)
    with trial_engine(dock, pool, settings, core, salt=harness.salt) as trial:
        config = AttachConfig(
            settings=harness.backend.settings(harness.settings),
            namespace=trial.cache.namespace,
            namespace_record=trial.cache.namespace_record,
        )
        harness.remember(pool, config)
        yield trial


@attrs.frozen(eq=False)
class _Drill:
    """The backend with an injector around it, for one engine after another."""

    harness: Harness
    dock: Dock
    faults: FaultInjector

    @classmethod
    def of(cls, harness: Harness, fault: Fault) -> _Drill:
        """Load the backend again, with faults around its stores."""
        backend = load_backend(harness.plugin)
        settings = FaultSettings(kinds=(fault,), rate=0.0, delay=0.05)
        injector = FaultInjector(settings)
        wrapped = Backend(wrapped_plugin(backend.plugin, [("faults", injector)]))
        dock = Dock({backend.name: wrapped})
        return cls(harness, dock, injector)

    @contextmanager
    def failing(self, sample: Sample, fault: Fault) -> Iterator[TrialEngine]:
        """Attach an engine whose every call is hit by the fault, this once.

        A busy machine may be slow, which is not a failure: only calls that are
        expected to fail have little time.
        """
        deadline_s = DEADLINE_S if fault in UNANSWERED else PATIENCE_S
        with engine_of(self.harness, self.dock, sample, deadline_s) as trial:
            self.faults.inject(rate=1.0)
            try:
                yield trial
            finally:
                self.faults.release()


class FaultTests:
    """Whatever fails on the way, no wrong byte reaches the engine."""

    @contract_test(every_fault)
    def test_a_fault_is_a_miss_in_time(
        self, harness: Harness, case: tuple[Fault, Sample]
    ) -> None:
        fault, sample = case
        drill = _Drill.of(harness, fault)
        with engine_of(harness, drill.dock, sample) as trial:
            stored, found, loaded = _in_time(trial)
            assert stored == len(PAGES), "not stored, although nothing failed"
            assert found == len(PAGES), "stored and not found, although nothing failed"
            assert loaded == len(PAGES), "not loaded, although nothing failed"
        with drill.failing(sample, fault) as trial:
            stored, found, loaded = _in_time(trial)
            whole = 0 if fault in UNANSWERED else len(PAGES)
            assert (stored, found) == (whole, whole), (
                "a missing answer was counted as one"
            )
            # Swapping may draw the same page twice, and does nothing then.
            most = len(PAGES) - (fault in SPOILING - {Fault.SWAP})
            assert loaded <= min(whole, most), "altered pages were called loaded"
            assert fault is not Fault.DELAY or loaded == len(PAGES), "late is not lost"
            # Late bytes land before the memory is looked at again.
            drill.faults.release()
            assert trial.cache.wait_idle(SETTLE_S)
            trial.load(len(PAGES))

    @contract_test(every_fault)
    def test_what_was_stored_before_a_fault_is_there_after_it(
        self, harness: Harness, case: tuple[Fault, Sample]
    ) -> None:
        fault, sample = case
        drill = _Drill.of(harness, fault)
        with engine_of(harness, drill.dock, sample) as trial:
            stored = trial.cache.put(PAGES, trial.fill())
            assert stored.pages == len(PAGES), "not stored, although nothing failed"
        with drill.failing(sample, fault) as trial:
            places = trial.fill()
            trial.cache.exists(PAGES)
            if fault not in SPOILING:
                trial.cache.put(PAGES, places)
                trial.cache.get(PAGES, places)
        with engine_of(harness, drill.dock, sample) as trial:
            found = _found_soon(trial)
            declared = harness.backend.manifest
            # Where pages outlive who stored them.
            if max(declared.durability, declared.sharing) >= Scope.PROCESS:
                assert found == len(PAGES), (
                    f"{found} of {len(PAGES)} stored pages are found after the fault"
                )
            assert trial.load(found).pages == found


def _in_time(trial: TrialEngine) -> tuple[int, int, int]:
    """Return the pages stored, found and loaded; assert that each call ends."""
    places = trial.fill()
    calls: tuple[Callable[[], int], ...] = (
        lambda: trial.cache.put(PAGES, places).pages,
        lambda: trial.cache.exists(PAGES).best,
        lambda: trial.load(len(PAGES)).pages,
    )
    pages = []
    for call in calls:
        began = time.monotonic()
        pages.append(call())
        took = time.monotonic() - began
        deadline_s = trial.cache.core.deadlines.get
        assert took < deadline_s + LATE_S, f"a call took {took:.1f} s"
    stored, found, loaded = pages
    return stored, found, loaded


def _found_soon(trial: TrialEngine) -> int:
    """Ask until every page is found, for a moment at most."""
    becomes(lambda: trial.cache.exists(PAGES).best == len(PAGES), SOON_S)
    return trial.cache.exists(PAGES).best
