"""Store and load pages of every kind and layout; compare each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock.hits import evaluate
from kvdock.testing.cases import Case, contract_test, limited, one_sample, samples
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.routes import ANCHOR
from kvdock.testing.samples import Sample, page_hash, page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.enums import PoolKind

ODD_BYTES = (1, 511, 4097, 65537)
"""Page sizes that are a multiple of nothing."""


LARGE_BYTES = ((1 << 20) + 1, (8 << 20) + 4099)
"""More than a library's own buffers and parts; a page may have 10 MB."""

MOST_KEYS_MOVED = 4096


def large_cases(manifest: Manifest) -> Iterable[Case]:
    """Run once, where the declared limit leaves room for it."""
    (case,) = one_sample(manifest)
    limit = manifest.max_object_bytes
    short = f"it takes objects of {limit} bytes at most"
    skip = case.skip or (short if 0 < limit < max(LARGE_BYTES) else "")
    yield Case("large", case.value, skip)


class PageTests:
    """Stored pages are loaded whole, in their place, and nothing else is."""

    @contract_test(samples(layouts=True, shardings=True))
    def test_pages_come_back_as_they_were_stored(self, rig: Setup) -> None:
        rig.stored(page_hashes(7))
        assert rig.exists(page_hashes(7)).all()
        rig.loaded(page_hashes(7))
        rig.loaded(page_hashes(7)[::-1])
        rig.loaded(page_hashes(1))

    @contract_test(samples())
    def test_pages_of_odd_sizes_come_back(self, harness: Harness, case: Sample) -> None:
        limit = harness.backend.manifest.max_object_bytes
        for nbytes in ODD_BYTES:
            if not limit or nbytes <= limit:
                sample = harness.sample(
                    case.kind, page_bytes=nbytes, name=f"odd{nbytes}"
                )
                setup = harness.rig(sample.pool(), pages=5)
                setup.kept(page_hashes(3))

    @contract_test(large_cases)
    def test_objects_of_many_mebibytes_come_back(
        self, harness: Harness, case: Sample
    ) -> None:
        if not harness.large_objects:
            pytest.skip("large objects are left out, as was asked for")
        for nbytes in LARGE_BYTES:
            sample = harness.sample(case.kind, page_bytes=nbytes, name=f"large{nbytes}")
            setup = harness.rig(sample.pool(), pages=3)
            setup.kept(page_hashes(2))
            setup.release()

    @contract_test(one_sample)
    def test_an_empty_batch_has_an_empty_answer(self, rig: Setup) -> None:
        assert rig.put([]).size == 0
        assert rig.get([]).size == 0
        assert rig.exists([]).size == 0
        assert rig.delete([]).size == 0

    @contract_test(one_sample)
    def test_a_batch_of_many_pages_is_answered_whole(
        self, harness: Harness, case: Sample
    ) -> None:
        # More than any client library's own batch: some stop at 128 keys.
        limit = harness.backend.manifest.max_batch_keys or 300
        count = min(limit, harness.scale.count(300, least=150))
        setup = harness.rig(case.pool(), pages=count)
        pages = page_hashes(count // setup.objects)
        setup.stored(pages)
        assert setup.exists(pages).all()
        setup.loaded(pages)

    @contract_test(limited("max_batch_keys"), proves="max_batch_keys")
    def test_a_batch_of_the_largest_size_is_taken(
        self, harness: Harness, case: int
    ) -> None:
        setup = harness.plain()

        keys = setup.keys(page_hashes(case))[:case]
        result = setup.call(Batch(Operation.EXISTS, keys, deadline_s=setup.until()))
        assert (result.outcomes == Outcome.ABSENT).all(), spelled(result.outcomes)

    @contract_test(limited("max_batch_keys"), proves="max_batch_keys")
    def test_a_batch_of_the_largest_size_moves_its_bytes(
        self, harness: Harness, case: int
    ) -> None:
        if case > MOST_KEYS_MOVED:
            pytest.skip(f"{case} pages are more than this test has time for")
        tiny = harness.any_pool(page_bytes=24, name="tiny")
        setup = harness.rig(tiny, pages=case)
        setup.kept(page_hashes(case))

    @contract_test(one_sample)
    def test_a_key_twice_in_a_batch_is_answered_twice(self, rig: Setup) -> None:
        first, second = page_hashes(2)
        rig.stored([first, second, first])
        assert rig.exists([first, first, page_hash("no"), second]).tolist() == [
            True,
            True,
            False,
            True,
        ]
        rig.loaded([first, second, first, first])

    @contract_test(samples())
    def test_a_missing_key_does_not_shift_the_others(self, rig: Setup) -> None:
        pages = page_hashes(8)
        there = np.array([1, 0, 1, 1, 0, 0, 1, 1], np.bool_)
        rig.stored([page for page, has in zip(pages, there, strict=True) if has])
        outcomes = rig.get(pages)
        assert ((outcomes == Outcome.OK).all(axis=1) == there).all(), (
            f"asked for stored {there.astype(int)}, got {outcomes.tolist()}"
        )

    @contract_test(samples())
    def test_exists_answers_each_key_for_itself(
        self, harness: Harness, case: Sample
    ) -> None:
        pages = page_hashes(8)
        for there in ([0, 1, 0, 0, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 0, 0]):
            setup = harness.rig(case.pool(), model=f"model-{there}")
            setup.stored([page for page, has in zip(pages, there, strict=True) if has])
            found = setup.exists(pages).astype(int).tolist()
            assert found == there, f"stored {there}, found {found}"

    @contract_test(one_sample)
    def test_absent_is_the_word_for_what_was_never_stored(self, rig: Setup) -> None:
        for outcomes in (rig.get(page_hashes(3)), rig.get(page_hashes(3, "again"))):
            assert (outcomes == Outcome.ABSENT).all(), spelled(outcomes)

    @contract_test(samples(policies=True))
    def test_sparse_pages_allow_what_the_hit_policy_says(
        self, harness: Harness, case: Sample
    ) -> None:
        setup = harness.rig(case.pool())
        pages = page_hashes(6)
        setup.stored([pages[index] for index in (1, 2, 4, 5)])
        found = evaluate(
            [ANCHOR, setup.pool], {setup.pool.name: setup.exists(pages)}, 6
        )
        wanted = {
            "all_pages": (),
            "trailing_pages": (3, 6),
            "block_groups": (1, 2, 3, 4, 5, 6),
        }
        assert found.prefixes == wanted[case.hit_policy.value], (
            f"of pages 1, 2, 4 and 5 the prefixes {found.prefixes} were made"
        )

    @contract_test(samples())
    def test_an_object_shorter_than_the_memory_is_a_miss(
        self, harness: Harness, case: Sample
    ) -> None:
        self._stored_at_another_length(harness, case.kind, stored=600, asked=1000)

    @contract_test(samples())
    def test_an_object_longer_than_the_memory_is_a_miss(
        self, harness: Harness, case: Sample
    ) -> None:
        self._stored_at_another_length(harness, case.kind, stored=1000, asked=600)

    def _stored_at_another_length(
        self, harness: Harness, kind: PoolKind, *, stored: int, asked: int
    ) -> None:
        """Let two pools of different page sizes meet under the same keys."""
        limit = harness.backend.manifest.max_object_bytes or 1000
        stored, asked = (min(each, each * limit // 1000) for each in (stored, asked))
        one = harness.rig(
            harness.sample(kind, page_bytes=max(stored, 1), name="same").pool()
        )
        two = harness.rig(
            harness.sample(kind, page_bytes=max(asked, 1), name="same").pool(), like=one
        )
        # The core's namespace keeps these apart; a defect there must not be
        # enough for wrong bytes.
        first, odd, last = page_hashes(3)
        one.stored([odd])
        two.stored([first, last])
        outcomes = two.get([first, odd, last])
        assert (outcomes[1] != Outcome.OK).all(), (
            f"an object of {stored} bytes was loaded as one of {asked}"
        )
        assert (outcomes[[0, 2]] == Outcome.OK).all(), (
            f"one object of another length spoilt the batch: {spelled(outcomes)}"
        )
