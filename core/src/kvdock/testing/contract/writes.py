"""Tests of the promises of put, delete and clear."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvdock.batch import Outcome
from kvdock.plugin.manifest import Scope, Support
from kvdock.testing.cases import Case, contract_test, one_sample, reaching, samples
from kvdock.testing.contract.retention import LONG_S, put_until
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.samples import Sample, page_hashes
from kvdock.testing.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.plugin.manifest import Manifest


MOST_DELETED = 1500
MOST_CLEARED = 12_000


def _kept_cases(manifest: Manifest) -> Iterable[Case]:
    """Run where pages stay until they are deleted."""
    (case,) = one_sample(manifest)
    skip = "it may evict pages at any time" if manifest.eviction else ""
    yield Case(case.id, case.value, case.skip or skip)


class WriteTests:
    """OK means stored; a stored key keeps its bytes until it is deleted."""

    @contract_test(samples())
    def test_a_successful_put_can_be_found_and_loaded(self, rig: Setup) -> None:
        pages = page_hashes(9)
        outcomes = rig.put(pages)
        taken = (outcomes == Outcome.OK).all(axis=1)
        assert (rig.exists(pages) >= taken).all(), "OK, but not found"
        loaded = (rig.get(pages) == Outcome.OK).all(axis=1)
        assert (loaded >= taken).all(), "OK, but not loaded"

    @contract_test(one_sample)
    def test_putting_again_is_harmless(self, rig: Setup) -> None:
        pages = page_hashes(4)
        for _ in range(3):
            rig.kept(pages)

    @contract_test(one_sample)
    def test_a_stored_key_keeps_its_bytes(self, rig: Setup) -> None:
        old, new = page_hashes(4)[:3], page_hashes(4)
        rig.stored(old, seed=1)
        outcomes = rig.put(new, seed=2)
        assert (outcomes == Outcome.OK).all(), spelled(outcomes)
        rig.loaded(old, seed=1)
        rig.loaded(new[3:], seed=2)

    @contract_test(one_sample)
    def test_a_deleted_page_is_gone_and_can_be_stored_again(self, rig: Setup) -> None:
        pages = page_hashes(4)
        rig.stored(pages, seed=1)
        outcomes = rig.delete(pages[:2])
        if (outcomes == Outcome.REFUSED).all():
            rig.loaded(pages, seed=1)
            return
        assert (outcomes == Outcome.OK).all(), spelled(outcomes)
        found = rig.exists(pages).tolist()
        assert found == [False, False, True, True], f"two of four deleted, {found}"
        assert (rig.get(pages[:2]) == Outcome.ABSENT).all()
        rig.kept(pages[:2], seed=2)
        rig.loaded(pages[2:], seed=1)

    @contract_test(one_sample, slow=True)
    def test_more_pages_are_deleted_than_one_batch_takes(
        self, harness: Harness, case: Sample
    ) -> None:
        # A library may delete fewer keys at once than it stores (S3: 1000).
        most = harness.backend.manifest.max_batch_keys or MOST_DELETED
        count = harness.scale.count(min(most, MOST_DELETED), least=1100) + 7
        tiny = harness.sample(case.kind, page_bytes=24, name="tiny").pool()
        setup = harness.rig(tiny, pages=1)
        pages = setup.fill(page_hashes(count))
        outcomes = setup.delete(pages[:-2])
        if (outcomes == Outcome.REFUSED).all():
            return
        assert (outcomes == Outcome.OK).all(), spelled(outcomes)
        left = setup.exists(pages)
        assert not left[:-2].any(), (
            f"{left[:-2].sum()} of {len(pages) - 2} are still there"
        )
        assert left[-2:].all(), "pages that were not to be deleted are gone"

    @contract_test(_kept_cases, slow=True)
    def test_pages_stay_where_nothing_is_evicted(
        self, harness: Harness, rig: Setup
    ) -> None:
        # Nothing looks at them meanwhile: each look may count as a use.
        rig.stored(page_hashes(5))
        end = time.monotonic() + harness.stays_s
        while (rest_s := end - time.monotonic()) > 0:
            time.sleep(rest_s)
        assert rig.exists(page_hashes(5)).all(), (
            f"pages are gone after {harness.stays_s:.0f} s, although it declares no "
            "eviction and nothing was deleted"
        )
        rig.loaded(page_hashes(5))

    @contract_test(reaching("sharing", Scope.PROCESS))
    def test_what_was_forgotten_is_not_found_by_those_who_attach_later(
        self, harness: Harness
    ) -> None:
        one = harness.plain()
        one.stored(page_hashes(4))
        deleted = bool((one.delete(page_hashes(2)) == Outcome.OK).all())
        later = harness.plain()
        assert later.exists(page_hashes(4)).tolist() == [not deleted] * 2 + [True] * 2
        later.loaded(page_hashes(4)[2:])
        if one.clear() is Outcome.OK:
            assert not harness.plain().exists(page_hashes(4)).any(), (
                "found after a clear"
            )

    @contract_test(one_sample)
    def test_deleting_what_is_not_there_is_no_failure(self, rig: Setup) -> None:
        outcomes = rig.delete(page_hashes(3))
        assert np.isin(outcomes, (Outcome.OK, Outcome.REFUSED)).all()

    @contract_test(reaching("clear_reach", Scope.NAMESPACE), proves="clear_reach")
    def test_clear_forgets_the_whole_namespace(self, harness: Harness) -> None:
        kinds = harness.backend.manifest.kinds
        rigs = harness.attach([harness.sample(kind).pool() for kind in kinds])
        for setup in rigs:
            setup.stored(page_hashes(3))
        assert rigs[0].clear() is Outcome.OK
        for setup in rigs:
            assert not setup.exists(page_hashes(3)).any(), (
                f"pages of pool {setup.pool.name!r} are left after a clear"
            )
        rigs[0].kept(page_hashes(3), seed=1)

    @contract_test(reaching("clear_reach", Scope.NAMESPACE), slow=True)
    def test_a_clear_forgets_thousands_of_pages(self, harness: Harness) -> None:
        # A library lists so many names at once (S3: 1000).
        count = harness.scale.count(MOST_CLEARED, least=1100)
        setup = harness.rig(harness.any_pool(page_bytes=24, name="tiny"), pages=1)
        pages = setup.fill(page_hashes(count))
        assert setup.clear() is Outcome.OK
        left = int(setup.exists(pages).sum())
        assert not left, f"{left} of {len(pages)} pages are left after a clear"

    @contract_test(
        reaching("clear_reach", Scope.NAMESPACE), proves="clear_reach", slow=True
    )
    def test_a_clear_forgets_what_others_have_stored(self, harness: Harness) -> None:
        sharing = harness.backend.manifest.sharing
        if sharing is Scope.NONE:
            pytest.skip("it declares no sharing")
        sample = harness.any_sample()
        cleaner, other = harness.rig(sample.pool()), harness.rig(sample.pool())
        other.stored(page_hashes(3, "other"))
        pages = page_hashes(3, "other") + page_hashes(3, "process")
        worker = Worker.start(harness) if sharing >= Scope.HOST else None
        try:
            if worker:
                worker.attach(sample)
                worker.ask("put", hashes=pages[3:])
            assert cleaner.clear() is Outcome.OK
        finally:
            if worker:
                worker.end()
        left = int(harness.rig(sample.pool()).exists(pages).sum())
        assert not left, f"{left} pages that others had stored are left after a clear"

    @contract_test(reaching("clear_reach", Scope.NAMESPACE))
    def test_a_clear_forgets_pages_that_are_promised(self, harness: Harness) -> None:
        if harness.backend.manifest.retention is not Support.NATIVE:
            pytest.skip("it promises nothing")
        setup, pages = harness.plain(), page_hashes(3)
        put_until(setup, pages, keep_s=LONG_S)
        assert setup.clear() is Outcome.OK
        assert not setup.exists(pages).any(), "a clear leaves pages that are promised"

    @contract_test(reaching("clear_reach", Scope.NAMESPACE))
    def test_clear_leaves_other_namespaces_alone(
        self, harness: Harness, case: Scope
    ) -> None:
        mine, other = harness.plain(), harness.plain("model-b")
        mine.stored(page_hashes(3))
        other.stored(page_hashes(3))
        mine.clear()
        if case is Scope.NAMESPACE:
            other.loaded(page_hashes(3))
        else:
            # It says that it takes more with it; then it may not lie about that.
            assert not mine.exists(page_hashes(3)).any()

    @contract_test(lambda manifest: [_no_clear(manifest.clear_reach)])
    def test_a_clear_that_is_not_declared_is_refused(self, harness: Harness) -> None:
        setup = harness.plain()
        setup.stored(page_hashes(2))
        assert setup.clear() is not Outcome.OK, "it clears although it declares none"
        setup.loaded(page_hashes(2))


def _no_clear(scope: Scope) -> Case:
    skip = "" if scope is Scope.NONE else f"it declares clear_reach {scope}"
    return Case(scope.value, scope, skip)
