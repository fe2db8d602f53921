"""Places that cannot be written: none of them stops a store for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from kvdock.batch import Outcome
from kvdock.testing.cases import Case, contract_test, graded, one_sample
from kvdock.testing.contract.limits import PAGE_BYTES
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.oracles import Fails, Oracle
from kvdock.testing.samples import page_hashes

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray
    from kvdock.plugin.manifest import Manifest

Failing = Callable[[object, str, Fails], AbstractContextManager[None]]
"""What an oracle lets fail; see `Oracle.failing`."""

ONE_IN = (3, 1)
"""Of how many writes one fails: some do, then all of them."""
FAILING_ROUNDS = 24
"""More than a store may have that leaves something behind with each failure."""

ROUND = 8
ROUNDS = 40
"""Together more pages than a small store of 4 MiB holds."""

BACK_S = 5.0
"""How long puts may fail once writes no longer do."""


def parts(manifest: Manifest) -> Iterable[Case]:
    """Run for pages and for what says where they lie."""
    (sample,) = one_sample(manifest)
    (eviction,) = graded("eviction")(manifest)
    for part in ("data", "index"):
        yield Case(part, part, sample.skip or eviction.skip)


class WriteFaultTests:
    """A write that fails costs its page, for as long as it fails."""

    @contract_test(parts, slow=True)
    def test_puts_come_back_after_writes_that_failed_now_and_then(
        self, failing: Failing, tight: Harness, case: str
    ) -> None:
        setup = _rig(tight)
        for turn in range(ROUNDS):  # a full store has to make room as well
            _round(setup, f"before {turn}")
        for one_in in ONE_IN:
            calls = 0

            def fails(place: str, one_in: int = one_in) -> bool:
                nonlocal calls
                del place
                calls += 1
                return calls % one_in == 0

            with failing(setup.store, case, fails):
                for turn in range(FAILING_ROUNDS):
                    _round(setup, f"one in {one_in} failing {turn}")
            assert calls >= one_in, f"the oracle saw no write of {case}"
            _expect_puts_back(setup, case, f"one in {one_in}")

    @contract_test(parts, slow=True)
    def test_one_place_that_always_fails_leaves_the_others_in_use(
        self, failing: Failing, tight: Harness, case: str
    ) -> None:
        first: list[str] = []

        def fails(place: str) -> bool:
            first.append(place)
            return place == first[0]

        setup = _rig(tight)
        for start in ("first", "second"):  # a restart meets the same place
            with failing(setup.store, case, fails):
                short = [
                    turn
                    for turn in range(ROUNDS)
                    if _round(setup, f"{start} {turn}").any()
                ]
            assert first, f"the oracle saw no write of {case}"
            # It may be tried again now and then, and not by every put.
            assert len(short) <= ROUNDS // 8, (
                f"one place of {case} cannot be written, and {len(short)} of "
                f"{ROUNDS} puts of the {start} start were not stored whole"
            )
            setup.release()
            tight.forget(setup)
            setup = _rig(tight)

    @pytest.fixture
    def failing(self, oracle: Oracle | None) -> Failing:
        """Return what lets writes fail, or skip."""
        if oracle is None:
            pytest.skip("the author gives no oracle")
        if type(oracle).failing is Oracle.failing:
            pytest.skip("the oracle cannot let writes fail")
        return oracle.failing


def _expect_puts_back(setup: Setup, part: str, label: str) -> None:
    """Fail unless puts are stored again, soon, and from then on."""
    deadline = setup.until(BACK_S)
    turn = 0
    while (put := _round(setup, f"after {label} {turn}")).any():
        assert time.monotonic() < deadline, (
            f"of the writes of {part} {label} failed for a while, and long after the "
            f"last one puts are still answered {spelled(put)}"
        )
        time.sleep(0.02)
        turn += 1
    for turn in range(ROUNDS // 4):
        put = _round(setup, f"back {label} {turn}")
        assert not put.any(), f"after a good put: {spelled(put)}"


def _rig(harness: Harness) -> Setup:
    pool = harness.any_pool(page_bytes=PAGE_BYTES, name="faults")
    return harness.rig(pool, pages=ROUND)


def _round(setup: Setup, label: str) -> OutcomeArray:
    """Store a batch and load what is said to be stored; return its outcomes."""
    pages = page_hashes(ROUND, label)
    outcomes = setup.put(pages)
    whole = (outcomes == Outcome.OK).all(axis=1)
    good = [page for page, ok in zip(pages, whole.tolist(), strict=True) if ok]
    if good:
        setup.loaded(good)
    if not setup.backend.manifest.eviction:
        setup.delete(pages)
    return outcomes
