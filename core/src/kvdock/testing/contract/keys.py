"""Keys: one for each object, the same in every process, within limits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock.pools.enums import PoolKind
from kvdock.pools.layout import stored_objects
from kvdock.pools.shard import Shard, every_shard
from kvdock.testing.cases import contract_test, limited, one_sample, samples
from kvdock.testing.harness import Harness, Setup, spelled
from kvdock.testing.samples import Sample, page_hash, page_hashes
from kvdock.testing.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.spec import PoolSpec


LONGEST_TRIED_BYTES = 1 << 16


def every_pool(manifest: Manifest) -> list[PoolSpec]:
    """Return a target and a draft pool of every declared kind."""
    found = []
    for kind, mine in manifest.kinds.items():
        found.append(Sample(kind=kind).pool())
        if mine.draft and kind is not PoolKind.LOGICAL:
            found.append(Sample(kind=kind, draft=True).pool())
    return found


def every_rank() -> Iterator[Shard]:
    """Yield ranks of several deployments, pipeline stages among them."""
    for size in (1, 2, 4):
        yield from every_shard(tp_size=size)
        yield from every_shard(tp_size=size, stages=((0, 2), (2, 4)))


class KeyTests:
    """A key names what an object holds, and nothing else."""

    @contract_test()
    def test_no_two_objects_share_a_suffix(self, harness: Harness) -> None:
        holds: dict[str, str] = {}
        for pool, shard in itertools.product(
            every_pool(harness.backend.manifest), every_rank()
        ):
            objects = stored_objects(pool, shard)
            suffixes = harness.backend.key_suffix(pool, shard)
            assert len(suffixes) == len(objects), (
                f"{len(suffixes)} suffixes for {len(objects)} objects of {pool.name}"
            )
            for suffix, stored in zip(suffixes, objects, strict=True):
                other = holds.setdefault(suffix, stored.coordinate)
                assert other == stored.coordinate, (
                    f"suffix {suffix!r} stands for {other} and for {stored.coordinate}"
                )

    @contract_test()
    def test_ranks_that_hold_the_same_object_give_it_the_same_key(
        self, harness: Harness
    ) -> None:
        names: dict[str, str] = {}
        for pool, shard in itertools.product(
            every_pool(harness.backend.manifest), every_rank()
        ):
            suffixes = harness.backend.key_suffix(pool, shard)
            for suffix, stored in zip(
                suffixes, stored_objects(pool, shard), strict=True
            ):
                other = names.setdefault(stored.coordinate, suffix)
                assert other == suffix, (
                    f"{stored.coordinate} is called {other!r} by one rank and "
                    f"{suffix!r} by another, so neither finds the other's"
                )

    @contract_test(slow=True)
    def test_keys_are_the_same_in_every_process(self, harness: Harness) -> None:
        kinds = [Sample(kind=kind) for kind in harness.backend.manifest.kinds]
        here = [
            list(harness.backend.key_suffix(sample.pool(), Shard())) for sample in kinds
        ]
        worker = Worker.start(harness, hash_seed=4242)
        words = [sample.words() for sample in kinds]
        there = worker.ask("suffixes", samples=words, shard={})
        worker.end()
        assert there == here, f"here {here[0]}, in another process {there[0]}"

    @contract_test(one_sample)
    def test_hashes_that_differ_at_the_end_are_told_apart(self, rig: Setup) -> None:
        longest = _room_for_hash(rig)
        hashes = [("a" * longest)[:-1] + last for last in "bcd"]
        rig.stored(hashes[:2])
        assert rig.exists(hashes).tolist() == [True, True, False], (
            f"of {longest} characters, those at the end are not looked at"
        )
        rig.loaded(hashes[:2])

    @contract_test(one_sample)
    def test_hashes_that_differ_in_case_are_told_apart(self, rig: Setup) -> None:
        # Page hashes are letters and digits; not every engine spells them in hex.
        lower, upper = "ab" * 32, "aB" * 32
        rig.stored([lower])
        assert rig.exists([lower, upper]).tolist() == [True, False], (
            "upper and lower case are one to it"
        )
        rig.stored([upper])
        rig.loaded([lower, upper])

    @contract_test(limited("max_key_bytes"), proves="max_key_bytes")
    def test_a_key_of_the_largest_size_is_kept(
        self, harness: Harness, case: int
    ) -> None:
        setup = harness.plain()
        if case > LONGEST_TRIED_BYTES:
            pytest.skip(f"no engine has keys of {case} bytes")
        rest = len(setup.config.namespace) + 1 + max(map(len, setup.suffixes))
        hashes = ["e" * (case - rest - 1) + last for last in "fg"]
        setup.kept(hashes)

    @contract_test(limited("max_key_bytes"), proves="max_key_bytes")
    def test_a_key_over_the_limit_is_refused_and_alone(
        self, harness: Harness, case: int
    ) -> None:
        setup = harness.plain()

        hashes = [page_hash(0), "e" * (case + 1), page_hash(1)]
        outcomes = setup.put(hashes)
        assert (outcomes[[0, 2]] == Outcome.OK).all(), (
            f"one key over the limit spoilt the batch: {spelled(outcomes)}"
        )
        assert (outcomes[1] != Outcome.OK).all(), "a key over the limit was taken"
        assert not setup.exists(hashes)[1], "a rejected key is found"
        setup.loaded([hashes[0], hashes[2]])

    @contract_test(one_sample)
    def test_a_hostile_key_reaches_nothing(self, rig: Setup) -> None:
        rig.stored(page_hashes(2))
        deadline = rig.until()
        tail = rig.suffixes[0]
        keys = [
            f"{rig.config.namespace}/../{rig.config.namespace}/{page_hashes(1)[0]}{tail}",
            f"{rig.config.namespace}/./{page_hashes(1)[0]}{tail}",
            f"{rig.config.namespace}/../../../../../../tmp/{page_hash(7)}{tail}",
            f"/etc/passwd{tail}",
            f"{rig.config.namespace}/%2e%2e/{page_hash(7)}\n{tail}",
        ]
        for operation in (Operation.EXISTS, Operation.DELETE):
            result = rig.call(Batch(operation, keys, deadline_s=deadline))
            found = result.outcomes == Outcome.OK
            if operation is Operation.EXISTS:
                assert not found.any(), f"found {np.array(keys)[found]}"
        rig.loaded(page_hashes(2))

    @contract_test(samples())
    def test_namespaces_share_nothing(self, harness: Harness, case: Sample) -> None:
        one = harness.rig(case.pool(), model="model-a")
        two = harness.rig(case.pool(), model="model-b")
        hashes = page_hashes(3)
        one.stored(hashes)
        assert not two.exists(hashes).any(), "found under another model"
        assert (two.get(hashes) != Outcome.OK).all(), "loaded from another model"
        two.stored(hashes, seed=1)
        one.loaded(hashes)
        two.loaded(hashes, seed=1)


def _room_for_hash(setup: Setup) -> int:
    """Return how long a page hash may be, 128 characters at most."""
    limit = setup.backend.manifest.max_key_bytes
    rest = len(setup.config.namespace) + 1 + max(map(len, setup.suffixes))
    return min(128, limit - rest) if limit else 128
