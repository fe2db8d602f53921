"""Tests of what a manifest declares, and of what the router makes of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from kvdock.errors import SettingsError
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.plugin.manifest import Capability, Manifest, Scope, Support
from kvdock.pools.enums import Layout, ObjectUnit, PoolKind, Sharding
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.routing.verdicts import TransferMode
from kvdock.testing.cases import (
    UNDECLARED,
    Case,
    contract_test,
    graded,
    graded_by_kind,
    limited,
    refusals,
    samples,
)
from kvdock.testing.harness import tightened
from kvdock.testing.samples import Sample, page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdock.pools.shard import Shard
    from kvdock.routing.plan import Route
    from kvdock.testing.harness import Harness


def only_route(harness: Harness, sample: Sample, shard: Shard | None = None) -> Route:
    """Return the route of one pool, or of its refusal."""
    (route,) = harness.routes([sample.pool()], shard)
    return route


def verdict_on(route: Route, capability: Capability) -> Support:
    """Return how the backend under test graded one capability."""
    (option,) = route.options
    return dict(option.verdicts)[capability].support


_NEEDS: Mapping[Capability, Mapping[str, Any]] = MappingProxyType(
    {
        Capability.SHARING: {"sharing": Scope.HOST},
        Capability.DURABILITY: {"durability": Scope.HOST},
        Capability.CLEAR_REACH: {"clear_reach": Scope.NAMESPACE},
        Capability.INTEGRITY: {"native_integrity": True},
        Capability.EVICTION: {"eviction": True},
        Capability.FORK_SAFE: {"fork_safe": True},
        Capability.PEERS: {"peers": True},
        Capability.MEMORY_REGISTRATION: {"registrable": False},
    }
)


def needed(manifest: Manifest) -> Iterable[Case]:
    """Run for everything that a deployment may ask of every backend."""
    for capability, asked in _NEEDS.items():
        declared = getattr(manifest, capability.value)
        grade = declared
        if capability is Capability.CLEAR_REACH:
            grade = Support.NATIVE if declared <= Scope.NAMESPACE else Support.NO
        elif isinstance(declared, Scope):
            (least,) = asked.values()
            grade = Support.NATIVE if declared >= least else Support.NO
        silent = grade is Support.UNDECLARED
        word = "undeclared" if silent else str(declared)
        skip = f"{UNDECLARED}: {capability}" if silent else ""
        yield Case(f"{capability}-{word}", (capability, grade), skip)


class DeclaredTests:
    """The manifest is true, and what it excludes is rejected with a reason."""

    @contract_test()
    def test_the_manifest_introduces_the_backend(self, harness: Harness) -> None:
        manifest = harness.backend.manifest
        assert manifest.name == harness.backend.name
        assert manifest.summary.strip(), "the summary is empty"
        assert "\n" not in manifest.summary, "the summary is more than one line"
        for field in attrs.fields(manifest.settings) if manifest.settings else ():
            assert field.metadata.get("help"), f"setting {field.name!r} has no help"

    @contract_test()
    def test_a_failed_finding_says_what_to_do(
        self, harness: Harness, config: Mapping[str, object]
    ) -> None:
        settings = harness.backend.settings(config)
        for finding in harness.backend.probe(AttachConfig(settings=settings)):
            assert finding.what, "a finding says nothing"
            assert finding.ok or finding.hint, f"{finding.what!r} comes without a hint"
            assert finding.ok, f"not ready to be tested: {finding.what}: {finding.hint}"

    @contract_test()
    def test_an_unknown_setting_is_refused_by_name(self, harness: Harness) -> None:
        with pytest.raises(SettingsError, match="no_such_setting"):
            harness.backend.settings(dict(harness.settings) | {"no_such_setting": "1"})

    @contract_test(samples(layouts=True, policies=True, shardings=True))
    def test_a_declared_pool_finds_a_route(
        self, harness: Harness, case: Sample
    ) -> None:
        route = only_route(harness, case)
        assert route.backend, f"declared, but rejected: {route.reason}"

    @contract_test(refusals)
    def test_what_is_left_out_is_refused_with_a_reason(
        self, harness: Harness, case: tuple[Capability, Sample]
    ) -> None:
        capability, sample = case
        route = only_route(harness, sample)
        if route.backend and not verdict_on(route, capability):
            pytest.fail("the router took a pool against a verdict")
        if not route.backend:
            assert harness.backend.name in route.reason
            assert len(route.reason) > len(harness.backend.name) + 2, "no reason"

    @contract_test(needed)
    def test_what_a_deployment_needs_is_met_or_refused_with_a_reason(
        self, harness: Harness, case: tuple[Capability, Support]
    ) -> None:
        capability, grade = case
        (route,) = harness.routes([harness.any_pool()], **_NEEDS[capability])
        if capability is Capability.MEMORY_REGISTRATION:
            # The memory in question is out of reach, so a copy is made.
            assert route.backend, route.reason
            assert route.mode is TransferMode.STAGED or not grade, route.reason
            return
        assert bool(route.backend) == bool(grade) or not verdict_on(route, capability)
        if not route.backend:
            assert harness.backend.name in route.reason
            assert not grade, f"declared, but rejected: {route.reason}"

    @contract_test(graded_by_kind("draft"), proves="draft")
    def test_draft_pools_are_kept_as_declared(
        self, harness: Harness, case: tuple[PoolKind, Support]
    ) -> None:
        kind, grade = case
        sample = harness.sample(kind, draft=True)
        route = only_route(harness, sample)
        if not grade:
            assert not route.backend or verdict_on(route, Capability.DRAFT)
            assert route.backend or "draft" in route.reason
            return
        target, draft = harness.attach([harness.sample(kind).pool(), sample.pool()])
        hashes = page_hashes(3)
        target.stored(hashes[:2])
        draft.stored(hashes)
        assert not target.exists(hashes)[2], "a draft page was found as a target page"
        target.loaded(hashes[:2])
        draft.loaded(hashes)

    @contract_test(graded_by_kind("multi_buffer"), proves="multi_buffer", slow=True)
    def test_objects_of_many_pieces_move_as_declared(
        self, harness: Harness, case: tuple[PoolKind, Support]
    ) -> None:
        kind, grade = case
        manifest = harness.backend.manifest
        if Layout.LAYER_FIRST not in manifest.kinds[kind].layouts:
            pytest.skip("it does not take layer_first, where a page is scattered")
        sample = harness.sample(kind, layout=Layout.LAYER_FIRST)
        if sample.page_bytes:
            pytest.skip("its objects are too small for a page of several pieces")
        setup = harness.rig(sample.pool())
        route = only_route(harness, sample)
        if grade and manifest.zero_copy:
            assert (route.mode, route.pool.object_unit) == (
                TransferMode.ZERO_COPY,
                ObjectUnit.PAGE,
            )
        elif not grade:
            whole = route.mode is TransferMode.ZERO_COPY and (
                route.pool.object_unit is ObjectUnit.PAGE
            )
            assert not whole or verdict_on(route, Capability.MULTI_BUFFER)
        setup.kept(page_hashes(5))
        for layers in (MANY_LAYERS, MOST_PIECES // len(setup.pool.parts)):
            deep = harness.sample(kind, layout=Layout.LAYER_FIRST, layers=layers)
            if grade and not deep.page_bytes:
                harness.rig(deep.pool(), pages=2).kept(page_hashes(2))

    @contract_test(graded("zero_copy"), proves="zero_copy")
    def test_bytes_move_as_directly_as_declared(
        self, harness: Harness, case: Support
    ) -> None:
        for kind in set(harness.backend.manifest.kinds) - {PoolKind.LOGICAL}:
            sample = harness.sample(kind)
            route = only_route(harness, sample)
            if not case:
                assert route.mode is not TransferMode.ZERO_COPY, route.reason
                assert route.mode.value in route.reason
            setup = harness.rig(sample.pool())
            setup.kept(page_hashes(4))

    @contract_test(limited("max_object_bytes"))
    def test_a_pool_over_the_object_limit_is_refused_with_numbers(
        self, harness: Harness, case: int
    ) -> None:
        for kind, mine in harness.backend.manifest.kinds.items():
            if kind is PoolKind.LOGICAL or Sharding.REPLICATED not in mine.shardings:
                continue
            route = only_route(harness, harness.sample(kind, page_bytes=case + 1))
            assert not route.backend, "it takes a pool over its own limit"
            assert str(case) in route.reason
            # What the backend does not verify has a trailer of the core.
            tail = 0 if harness.backend.manifest.integrity else TRAILER_BYTES
            fits = only_route(harness, harness.sample(kind, page_bytes=case - tail))
            assert fits.backend or tightened(fits), fits.reason

    @contract_test(limited("max_object_bytes"), proves="max_object_bytes")
    def test_an_object_of_the_largest_size_is_kept(
        self, harness: Harness, case: int
    ) -> None:
        if case > _LARGE_BYTES and not harness.large_objects:
            pytest.skip("large objects are left out, as was asked for")
        largest = harness.any_pool(page_bytes=min(case, _LARGEST_TRIED_BYTES))
        # With a trailer of the core the page would be smaller, and the object as large.
        setup = harness.rig(largest, pages=2, integrity="off")
        setup.kept(page_hashes(1))


MANY_LAYERS = 80
MOST_PIECES = 2000
"""Of one page: more than libraries take buffers in one call (1024)."""

_LARGEST_TRIED_BYTES = 64 << 20
"""More than a page of any engine: what a larger limit promises is not tried."""

_LARGE_BYTES = 8 << 20
