"""Promises that hold within a budget, and pages that are gone at their time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import attrs
import numpy as np
import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock.dock import Dock
from kvdock.plugin.manifest import Support
from kvdock.testing.cases import claimed, contract_test
from kvdock.testing.contract.faulty import engine_of, one_anchor
from kvdock.testing.contract.reports import MOST_ROUNDS, PAGE_BYTES, ROUND, flood
from kvdock.testing.harness import PATIENCE_S, becomes
from kvdock.testing.samples import page_hashes
from kvdock.testing.trial_engine import PAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvdock.arrays import BoolArray, OutcomeArray
    from kvdock.plugin.manifest import Manifest
    from kvdock.testing.cases import Case, Chooser
    from kvdock.testing.harness import Harness, Setup

LONG_S = 3600
YEAR_S = 366 * 24 * LONG_S
SHORT_S = 2


def put_until(
    setup: Setup, pages: Sequence[str], *, keep_s: int = 0, expire_s: int = 0
) -> tuple[BoolArray, BoolArray]:
    """Store pages with times; return which are stored, and which are promised."""
    places = setup.places(len(pages))
    setup.memory.blank(*setup.own)
    for place, page in zip(places, pages, strict=True):
        setup.memory.write(int(place), page, 0)
    batch, _rows = setup.batch(Operation.PUT, pages, places)
    result = setup.call(_timed(batch, keep_s, expire_s))
    kept = np.zeros(len(batch), np.bool_) if result.kept is None else result.kept
    assert kept.shape == result.ok.shape, "`kept` has another length"
    whole = result.ok.reshape(len(pages), -1).min(axis=1)
    return whole, (result.ok & kept).reshape(len(pages), -1).min(axis=1)


def retain(
    setup: Setup, pages: Sequence[str], *, keep_s: int = 0, expire_s: int = 0
) -> OutcomeArray:
    """Change the times of stored pages; return the worst outcome of each."""
    batch = Batch(Operation.RETAIN, setup.keys(pages), deadline_s=setup.until())
    outcomes = setup.call(_timed(batch, keep_s, expire_s)).outcomes
    worst: OutcomeArray = outcomes.reshape(len(pages), -1).max(axis=1)
    return worst


def _timed(batch: Batch, keep_s: int, expire_s: int) -> Batch:
    now = int(time.time())
    ends = np.full(len(batch), now + expire_s, np.int64) if expire_s else None
    until = now + keep_s if keep_s else 0
    return attrs.evolve(batch, keep_until=until, expire_at=ends)


def chosen(pages: Sequence[str], which: BoolArray) -> list[str]:
    """Return some of the pages."""
    return [page for page, one in zip(pages, which.tolist(), strict=True) if one]


def wait_gone(setup: Setup, pages: Sequence[str]) -> None:
    """Wait until the time of pages is over and none of them is found."""
    patience_s = SHORT_S + setup.scale.seconds(2.0)
    gone = becomes(lambda: not setup.exists(pages).any(), patience_s)
    assert gone, "pages are found after their time"


def of_grade(grade: Support) -> Chooser:
    """Run where retention has this grade; skip where it has another one."""

    def choose(manifest: Manifest) -> Iterable[Case]:
        for case in claimed("retention")(manifest):
            other = f"retention is {manifest.retention}"
            right = case.skip or manifest.retention is grade
            yield case if right else attrs.evolve(case, skip=other)

    return choose


class RetentionTests:
    """Promised pages stay, within a budget, and expired ones are gone."""

    @pytest.fixture
    def promising(self, tight: Harness) -> Harness:
        """Return a store that is soon full and gives promises, or skip."""
        (route,) = tight.routes([tight.any_pool()])
        if route.nearest and route.nearest.retention is not Support.NATIVE:
            pytest.skip("with these settings it promises nothing")
        return tight

    @contract_test(of_grade(Support.NATIVE), proves="retention")
    def test_promised_pages_stay_while_others_are_evicted(
        self, promising: Harness
    ) -> None:
        tight = promising
        pool = tight.any_pool(page_bytes=PAGE_BYTES, name="kept")
        at_put, later = page_hashes(4, "at put"), page_hashes(4, "later")
        other = page_hashes(ROUND, "other")
        setup = tight.rig(pool, pages=ROUND)
        _, kept = put_until(setup, at_put, keep_s=LONG_S)
        setup.stored(later)
        answers = retain(setup, [*later, *page_hashes(1, "never")], keep_s=LONG_S)
        assert answers[-1] == Outcome.ABSENT, "a promise for a page that is absent"
        promised = chosen(at_put, kept)
        promised += chosen(later, answers[:-1] == Outcome.OK)
        assert len(promised) > 4, "a store that is nearly empty promises nothing"
        setup.stored(other)
        flood(setup, other)
        assert setup.exists(promised).all(), "an accepted promise is broken"
        setup.loaded(promised)
        again = tight.rig(pool, pages=ROUND, like=setup)
        flood_more(again)
        assert again.exists(promised).all(), (
            "an accepted promise is broken after the pool was attached again"
        )

    @contract_test(of_grade(Support.NATIVE))
    def test_promises_leave_room_for_other_pages(self, promising: Harness) -> None:
        tight = promising
        pool = tight.any_pool(page_bytes=PAGE_BYTES, name="all_kept")
        promised: list[str] = []
        setup = tight.rig(pool, pages=ROUND)
        for turn in range(MOST_ROUNDS):
            pages = page_hashes(ROUND, f"kept {turn}")
            _, kept = put_until(setup, pages, keep_s=LONG_S)
            promised += chosen(pages, kept)
            if not kept.any():
                break
        else:
            pytest.fail("a small store promises whatever it is asked for")
        assert setup.exists(promised).all(), "an accepted promise is broken"
        fresh = page_hashes(ROUND, "fresh")
        setup.put(fresh)
        assert setup.exists(fresh).any(), (
            "promises fill the whole store, and nothing else is stored any more"
        )

    @contract_test(of_grade(Support.NATIVE), proves="retention", slow=True)
    def test_pages_are_not_served_after_their_time(self, harness: Harness) -> None:
        setup = harness.plain()
        at_put, later = page_hashes(4, "at put"), page_hashes(4, "later")
        stay = page_hashes(4, "stay")
        stored, _ = put_until(setup, at_put, expire_s=SHORT_S)
        assert stored.all()
        setup.stored(later)
        setup.stored(stay)
        assert (retain(setup, later, expire_s=SHORT_S) == Outcome.OK).all()
        gone = [*at_put, *later]
        wait_gone(setup, gone)
        for pages in (gone, gone[:1]):
            found = setup.get(pages)
            assert (found == Outcome.ABSENT).all(), "a page is served after its time"
        setup.loaded(stay)
        # Stored again it is a new page, that lasts.
        setup.kept(gone)

    @contract_test(of_grade(Support.NATIVE), slow=True)
    def test_a_clock_that_is_set_back_brings_no_page_back(
        self, harness: Harness
    ) -> None:
        setup = harness.plain()
        pages = page_hashes(4, "gone")
        put_until(setup, pages, expire_s=SHORT_S)
        wait_gone(setup, pages)
        now = time.time
        with patch("time.time", lambda: now() - LONG_S):
            assert not setup.exists(pages).any(), "an expired page is found again"
            assert (setup.get(pages) == Outcome.ABSENT).all()

    @contract_test(of_grade(Support.EMULATED), proves="retention")
    def test_pages_that_expire_by_trailers_make_room_for_new_ones(
        self, harness: Harness
    ) -> None:
        anchor = one_anchor(harness.backend.manifest)
        if anchor.skip:
            pytest.skip(anchor.skip)
        dock = Dock({harness.backend.name: harness.backend})
        with engine_of(harness, dock, anchor.value) as trial:
            where = trial.fill()
            stored = trial.cache.put(PAGES, where, expire_s=LONG_S)
            assert stored.pages == len(PAGES), "pages that expire are not stored"
            assert trial.load(len(PAGES)).pages == len(PAGES)
            now = time.time
            with patch("time.time", lambda: now() + 2 * LONG_S):
                assert not trial.load(len(PAGES)).pages, (
                    "a page is served after its time"
                )
                assert becomes(
                    lambda: not trial.cache.exists(PAGES).best,
                    harness.scale.seconds(PATIENCE_S),
                ), "expired pages are not deleted"
                assert trial.cache.put(PAGES, where).pages == len(PAGES)
                assert trial.load(len(PAGES)).pages == len(PAGES), (
                    "pages cannot be stored again after their time"
                )

    @contract_test(of_grade(Support.EMULATED))
    def test_a_wish_to_be_kept_is_stored_and_is_no_promise(
        self, harness: Harness
    ) -> None:
        setup, pages = harness.plain(), page_hashes(4, "wished")
        stored, kept = put_until(setup, pages, keep_s=YEAR_S)
        assert stored.all(), "a page is not stored for the wish to keep it"
        assert not kept.any(), "an emulated retention promises"
        setup.loaded(pages)


def flood_more(setup: Setup) -> None:
    """Store other pages than before, as many again."""
    for turn in range(ROUND):
        setup.put(page_hashes(ROUND, f"more {turn}"))
