"""The contract itself: sealed, and switched on field by field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import watched

from kvdock.config.core import StagingPolicy
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Scope, Support
from kvdock.pools.enums import HitPolicy, Layout, PoolKind, Sharding
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements, evaluate_backend
from kvdock.testing import BackendContract
from kvdock.testing.cases import selection
from kvdock.testing.contract.suite import groups
from kvdock.testing.samples import Sample
from kvdock.testing.subprocess import run_tests

if TYPE_CHECKING:
    from collections.abc import Mapping


def kind(**changes: Any) -> KindSupport:
    return attrs.evolve(
        KindSupport(
            hit_policies=HitPolicy,
            split_heads=Support.NATIVE,
            draft=Support.NATIVE,
            multi_buffer=Support.NATIVE,
        ),
        **changes,
    )


def manifest(**changes: Any) -> Manifest:
    return attrs.evolve(
        Manifest(
            name="probe",
            api=API_VERSION,
            summary="declares everything",
            kinds={one: kind() for one in PoolKind},
            zero_copy=Support.NATIVE,
            memory_registration=Support.NATIVE,
            host_allocator=Support.NATIVE,
            gated_get=Support.NATIVE,
            gated_put=Support.NATIVE,
            peers=Support.NATIVE,
            integrity=Support.NATIVE,
            eviction=Support.NATIVE,
            touch=Support.NATIVE,
            removed=Support.NATIVE,
            capacity=Support.NATIVE,
            retention=Support.NATIVE,
            durability=Scope.CLUSTER,
            sharing=Scope.CLUSTER,
            clear_reach=Scope.NAMESPACE,
            max_object_bytes=1 << 20,
            max_batch_keys=512,
            max_key_bytes=512,
            fork_safe=Support.NATIVE,
        ),
        **changes,
    )


def all_kinds(**changes: Any) -> dict[PoolKind, KindSupport]:
    return {one: kind(**changes) for one in PoolKind}


@attrs.frozen
class _Settings:
    pass


OTHER: Mapping[str, Mapping[str, Any]] = {
    "kinds": {"kinds": {PoolKind.MHA: kind()}},
    "hit_policies": {"kinds": all_kinds(hit_policies={HitPolicy.ALL_PAGES})},
    "layouts": {"kinds": all_kinds(layouts={Layout.PAGE_OBJECT})},
    "shardings": {"kinds": all_kinds(shardings={Sharding.REPLICATED})},
    "split_heads": {"kinds": all_kinds(split_heads=Support.UNDECLARED)},
    "draft": {"kinds": all_kinds(draft=Support.UNDECLARED)},
    "multi_buffer": {"kinds": all_kinds(multi_buffer=Support.UNDECLARED)},
    "zero_copy": {"zero_copy": Support.UNDECLARED},
    "memory_registration": {"memory_registration": Support.UNDECLARED},
    "host_allocator": {"host_allocator": Support.UNDECLARED},
    "gated_get": {"gated_get": Support.UNDECLARED},
    "gated_put": {"gated_put": Support.UNDECLARED},
    "peers": {"peers": Support.UNDECLARED},
    "integrity": {"integrity": Support.UNDECLARED},
    "eviction": {"eviction": Support.UNDECLARED},
    "touch": {"touch": Support.UNDECLARED},
    "removed": {"removed": Support.UNDECLARED},
    "capacity": {"capacity": Support.UNDECLARED},
    "retention": {"retention": Support.UNDECLARED},
    "durability": {"durability": Scope.NONE},
    "sharing": {"sharing": Scope.NONE},
    "clear_reach": {"clear_reach": Scope.NONE},
    "max_object_bytes": {"max_object_bytes": 0},
    "max_batch_keys": {"max_batch_keys": 0},
    "max_key_bytes": {"max_key_bytes": 0},
    "fork_safe": {"fork_safe": Support.UNDECLARED},
}
"""A manifest that differs from the full one in one field only."""


def runs(declared: Manifest) -> dict[str, frozenset[str]]:
    """Return what each test of the contract is run with."""
    return {
        test: frozenset(_tried(case.value) for case in cases if not case.skip)
        for test, cases in selection(BackendContract, declared).items()
    }


def _tried(value: object) -> str:
    """Write what a test is run with, without the grade that let it run."""
    if isinstance(value, tuple):
        return " ".join(map(_tried, value))
    return "declared" if isinstance(value, Support | Scope | int) else repr(value)


@pytest.fixture(scope="module")
def touching(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """The tests of the contract that move pages through a backend."""
    record = tmp_path_factory.mktemp("watch") / "tests"
    environ = {watched.RECORD: str(record)}
    ran = run_tests([watched.__file__], environ=environ, timeout_s=600.0)
    assert {end.how for end in ran.ended} <= {"passed", "skipped"}, ran.said
    lines = record.read_text().splitlines()
    return frozenset(re.findall(r"::(test_\w+)", " ".join(lines)))


@pytest.mark.slow
@pytest.mark.parametrize("field", OTHER)
def test_every_declared_capability_switches_tests_on(
    field: str, touching: frozenset[str]
) -> None:
    """Tests that move pages: a row in a plan proves nothing about a backend."""
    full, less = runs(manifest()), runs(manifest(**OTHER[field]))
    changed = [test for test in touching if full[test] != less[test]]
    assert changed, f"{field} is declared, and no test tries it with a backend"


def test_every_field_of_a_manifest_is_read_by_the_contract() -> None:
    declared = {one.name for one in attrs.fields(Manifest)}
    declared |= {one.name for one in attrs.fields(KindSupport)}
    # Identity: the loader compares name and number before anything else runs,
    # and these three have a test that every backend runs.
    always = {"name", "api", "summary", "settings"}
    # These change what the tests of transfers to peers do, and not which are run.
    always |= {"max_send_rows", "landing_run_bytes", "send_drain_s"}
    # A plugin that declares it is rejected when it is loaded.
    always |= {"sealed"}
    assert declared - always == set(OTHER)


GRADES = [
    field
    for field, changes in OTHER.items()
    if Support.UNDECLARED in [*changes.values()]
    or any(
        Support.UNDECLARED in attrs.astuple(support, recurse=False)
        for support in changes.get("kinds", {}).values()
    )
]


@pytest.mark.parametrize("field", GRADES)
def test_silence_is_shown_by_its_word(field: str) -> None:
    less = manifest(**OTHER[field])
    reasons = [
        case.skip
        for cases in selection(BackendContract, less).values()
        for case in cases
        if case.skip
    ]
    assert any(one.startswith("UNDECLARED") and field in one for one in reasons)


def test_no_test_of_the_contract_is_lost_without_a_case() -> None:
    bare = Manifest(
        name="bare",
        api=API_VERSION,
        summary="counts pages",
        kinds={PoolKind.LOGICAL: KindSupport()},
    )
    for declared in (manifest(), bare):
        for test, cases in selection(BackendContract, declared).items():
            assert cases, f"{test} has no case, so pytest would drop it silently"
            assert len({case.id for case in cases}) == len(cases), test


def test_every_test_of_the_contract_belongs_to_a_group() -> None:
    assert set(groups(BackendContract)) == set(runs(manifest()))


ASKED: Mapping[str, tuple[Sample, RouteRequirements]] = {
    "kinds": (Sample(kind=PoolKind.MLA), RouteRequirements()),
    "hit_policies": (
        Sample(kind=PoolKind.MHA, hit_policy=HitPolicy.TRAILING_PAGES),
        RouteRequirements(),
    ),
    "layouts": (
        Sample(kind=PoolKind.MHA, layout=Layout.PAGE_FIRST),
        RouteRequirements(),
    ),
    "shardings": (Sample(kind=PoolKind.MHA), RouteRequirements()),
    "split_heads": (Sample(kind=PoolKind.MHA, head_group=1), RouteRequirements()),
    "draft": (Sample(kind=PoolKind.MHA, draft=True), RouteRequirements()),
    "multi_buffer": (
        Sample(kind=PoolKind.MHA, layout=Layout.LAYER_FIRST),
        RouteRequirements(),
    ),
    "zero_copy": (Sample(kind=PoolKind.MHA), RouteRequirements()),
    "memory_registration": (
        Sample(kind=PoolKind.MHA),
        RouteRequirements(registrable=False),
    ),
    "host_allocator": (Sample(kind=PoolKind.MHA), RouteRequirements()),
    "peers": (
        Sample(kind=PoolKind.MHA),
        RouteRequirements(peers=True),
    ),
    "gated_get": (
        Sample(kind=PoolKind.MHA),
        RouteRequirements(staging=StagingPolicy.SAFE),
    ),
    "gated_put": (
        Sample(kind=PoolKind.MHA),
        RouteRequirements(staging=StagingPolicy.SAFE),
    ),
    "integrity": (Sample(kind=PoolKind.MHA), RouteRequirements(native_integrity=True)),
    "eviction": (Sample(kind=PoolKind.MHA), RouteRequirements(eviction=True)),
    "durability": (Sample(kind=PoolKind.MHA), RouteRequirements(durability=Scope.HOST)),
    "sharing": (Sample(kind=PoolKind.MHA), RouteRequirements(sharing=Scope.HOST)),
    "clear_reach": (
        Sample(kind=PoolKind.MHA),
        RouteRequirements(clear_reach=Scope.NAMESPACE),
    ),
    "max_object_bytes": (
        Sample(kind=PoolKind.MHA, page_bytes=600),
        RouteRequirements(),
    ),
    "max_batch_keys": (Sample(kind=PoolKind.MHA, head_group=1), RouteRequirements()),
    "max_key_bytes": (Sample(kind=PoolKind.MHA), RouteRequirements()),
    "fork_safe": (Sample(kind=PoolKind.MHA), RouteRequirements(fork_safe=True)),
}
"""A pool, and a deployment, to which the field makes a difference."""

OTHER_ROUTED = dict(OTHER) | {
    "max_object_bytes": {"max_object_bytes": 100},
    "max_batch_keys": {"max_batch_keys": 2},
    "max_key_bytes": {"max_key_bytes": 80},
    "clear_reach": {"clear_reach": Scope.CLUSTER},
}


UNROUTED = {"touch", "removed", "capacity", "retention"}
"""What a store can do besides moving pages: no pool is refused for the lack of it."""


@pytest.mark.parametrize("field", sorted(OTHER_ROUTED.keys() - UNROUTED))
def test_every_declared_capability_changes_a_route(field: str) -> None:
    sample, needs = ASKED[field]
    if field != "host_allocator":
        needs = attrs.evolve(needs, allocator="probe")
    other = manifest(**OTHER_ROUTED[field])
    full = evaluate_backend(sample.pool(), Shard(), manifest(), needs, unproven="")
    less = evaluate_backend(sample.pool(), Shard(), other, needs, unproven="")
    assert (full.accepted, full.mode, full.unit) != (
        less.accepted,
        less.mode,
        less.unit,
    ), f"no rule of the router reads {field}"
