"""Many ranks, one store: who writes what, and who finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.plugin.manifest import Manifest, Scope, Support
from kvdock.pools.enums import Layout, PoolKind, Sharding
from kvdock.pools.shard import Shard, every_shard
from kvdock.testing.cases import Case, contract_test, graded_by_kind, samples
from kvdock.testing.contract.declared import only_route
from kvdock.testing.samples import HEADS, Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.pools.spec import PoolSpec
    from kvdock.testing.harness import Harness, Setup

PAGES = page_hashes(3)


def write_all(harness: Harness, pool: PoolSpec, shards: Iterable[Shard]) -> list[Setup]:
    """Attach every rank; let those store that are writers."""
    rigs = [harness.rig(pool, shard, pages=4) for shard in shards]
    for setup in rigs:
        if setup.pool.writes(setup.config.shard):
            setup.stored(PAGES)
    return rigs


def needs_sharing(manifest: Manifest) -> str:
    """Return why ranks cannot be tried in one process, or ""."""
    if manifest.sharing is Scope.NONE:
        return "it declares no sharing, so no rank finds another's pages"
    return ""


def shared_samples(manifest: Manifest) -> Iterable[Case]:
    """Run for each kind and sharding, if ranks can meet at all."""
    for case in samples(shardings=True)(manifest):
        skip = case.skip or needs_sharing(manifest)
        yield Case(case.id, case.value, skip)


def split_cases(manifest: Manifest) -> Iterable[Case]:
    """Run for each kind that can be divided by heads."""
    for case in graded_by_kind("split_heads")(manifest):
        kind, _ = case.value or (None, None)
        skip = case.skip or needs_sharing(manifest)
        if kind not in {PoolKind.MHA, PoolKind.K_ONLY, PoolKind.SWA}:
            continue
        if Sharding.HEADS not in manifest.kinds[kind].shardings:
            skip = skip or "it does not take pools divided by heads"
        yield Case(case.id, case.value, skip)


def _split_or_skip(manifest: Manifest) -> Iterable[Case]:
    found = list(split_cases(manifest))
    return found or [Case("none", None, "it takes no pool that has heads")]


def draft_on_latent(manifest: Manifest) -> Iterable[Case]:
    """Run where an MLA target and an MHA draft can both be kept."""
    skip = needs_sharing(manifest)
    mha = manifest.kinds.get(PoolKind.MHA)
    if mha is None or PoolKind.MLA not in manifest.kinds:
        skip = "it does not take both MHA and MLA pools"
    elif mha.draft is Support.UNDECLARED:
        skip = "UNDECLARED: draft of mha pools"
    elif not mha.draft:
        skip = "NO: it declares no draft of mha pools"
    yield Case("mha-on-mla", None, skip)


def logical(manifest: Manifest) -> Iterable[Case]:
    """Run where logical anchors are taken."""
    taken = PoolKind.LOGICAL in manifest.kinds
    yield Case("logical", None, "" if taken else "it takes no logical pools")


class RankTests:
    """Every rank finds all that it needs and nothing that is another's."""

    @contract_test(shared_samples, slow=True)
    def test_every_rank_finds_its_own_slice(
        self, harness: Harness, case: Sample
    ) -> None:
        for size in (2, 4, 2 * HEADS):
            by_token = case.sharding is Sharding.DCP
            shards = every_shard(tp_size=size, dcp_size=2 if by_token else 1)
            sample = attrs.evolve(case, name=f"{case.kind}_tp{size}")
            for setup in write_all(harness, sample.pool(), shards):
                setup.loaded_soon(PAGES)

    @contract_test(_split_or_skip, proves="split_heads", slow=True)
    def test_split_heads_are_shared_across_tp_sizes(
        self, harness: Harness, case: tuple[PoolKind, Support]
    ) -> None:
        kind, grade = case
        sample = harness.sample(
            kind, sharding=Sharding.HEADS, head_group=1, name="split"
        )
        route = only_route(harness, sample, Shard(tp_size=2))
        if not grade:
            assert not route.backend, "declared NO, but taken"
            assert "split" in route.reason
            return
        # Where the manifest's own limits are in the way, this skips.
        write_all(harness, sample.pool(), every_shard(tp_size=4))
        for size in (1, 2, 4):
            for shard in every_shard(tp_size=size):
                harness.rig(sample.pool(), shard, pages=4).loaded_soon(PAGES)

    @contract_test(_split_or_skip)
    def test_split_heads_are_shared_across_layouts_that_store_alike(
        self, harness: Harness, case: tuple[PoolKind, Support]
    ) -> None:
        kind, grade = case
        known = harness.backend.manifest.kinds[kind].layouts
        alike = [
            layout
            for layout in (Layout.PAGE_OBJECT, Layout.PAGE_FIRST_DIRECT)
            if layout in known
        ]
        rigs = [
            harness.rig(
                harness.sample(
                    kind,
                    layout=layout,
                    sharding=Sharding.HEADS,
                    head_group=2 if grade else 0,
                ).pool()
            )
            for layout in alike
        ]
        units = {setup.pool.object_unit for setup in rigs}
        for setup in rigs if len(units) == 1 else ():
            setup.stored(PAGES[:1])
            for other in rigs:
                other.loaded_soon(PAGES[:1])

    @contract_test(draft_on_latent)
    def test_an_mha_draft_on_an_mla_target_is_whole_on_every_rank(
        self, harness: Harness
    ) -> None:
        target = harness.sample(PoolKind.MLA, name="kv").pool()
        draft = harness.sample(PoolKind.MHA, name="draft", draft=True).pool()
        attached = [
            harness.attach([target, draft], shard) for shard in every_shard(tp_size=4)
        ]
        for kv, heads in attached:
            if kv.pool.writes(kv.config.shard):
                kv.stored(PAGES)
            # The target has one writer; every rank writes its draft.
            heads.stored(PAGES)
        for kv, heads in attached:
            kv.loaded_soon(PAGES)
            heads.loaded_soon(PAGES)

    @contract_test(shared_samples)
    def test_pipeline_stages_do_not_overwrite_each_other(
        self, harness: Harness, case: Sample
    ) -> None:
        if case.sharding is Sharding.DCP:
            case = attrs.evolve(case, sharding=None)
        stages = every_shard(stages=((0, 2), (2, 4)))
        rigs = write_all(harness, case.pool(), stages)
        for setup in rigs:
            setup.loaded_soon(PAGES)

    @contract_test(logical)
    def test_a_logical_anchor_marks_pages_without_bytes(self, harness: Harness) -> None:
        setup = harness.rig(harness.sample(PoolKind.LOGICAL, name="mark").pool())
        setup.stored([PAGES[0], PAGES[2]])
        assert setup.exists(PAGES).tolist() == [True, False, True]
        setup.loaded_soon([PAGES[0], PAGES[2]])
