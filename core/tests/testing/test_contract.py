"""The contract itself: sealed, and switched on field by field."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import watched

from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Scope, Support
from kvdock.pools.enums import HitPolicy, Layout, PoolKind, Sharding
from kvdock.testing import BackendContract
from kvdock.testing.cases import selection
from kvdock.testing.contract.suite import groups
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


GRADES_OF_MANIFESTS = [
    one.name for one in attrs.fields(Manifest) if isinstance(one.default, Support)
]


def manifest(**changes: Any) -> Manifest:
    """Return a manifest that declares everything, but for some changes."""
    declared: dict[str, Any] = dict.fromkeys(GRADES_OF_MANIFESTS, Support.NATIVE)
    return Manifest(
        **declared
        | {
            "name": "probe",
            "api": API_VERSION,
            "summary": "declares everything",
            "kinds": all_kinds(),
            "durability": Scope.CLUSTER,
            "sharing": Scope.CLUSTER,
            "clear_reach": Scope.NAMESPACE,
            "max_object_bytes": 1 << 20,
            "max_batch_keys": 512,
            "max_key_bytes": 512,
        }
        | changes
    )


def all_kinds(**changes: Any) -> dict[PoolKind, KindSupport]:
    return {one: kind(**changes) for one in PoolKind}


OTHER: Mapping[str, Mapping[str, Any]] = {
    "kinds": {"kinds": {PoolKind.MHA: kind()}},
    "hit_policies": {"kinds": all_kinds(hit_policies={HitPolicy.ALL_PAGES})},
    "layouts": {"kinds": all_kinds(layouts={Layout.PAGE_OBJECT})},
    "shardings": {"kinds": all_kinds(shardings={Sharding.REPLICATED})},
    "split_heads": {"kinds": all_kinds(split_heads=Support.UNDECLARED)},
    "draft": {"kinds": all_kinds(draft=Support.UNDECLARED)},
    "multi_buffer": {"kinds": all_kinds(multi_buffer=Support.UNDECLARED)},
    **{name: {name: Support.UNDECLARED} for name in GRADES_OF_MANIFESTS},
    "durability": {"durability": Scope.NONE},
    "sharing": {"sharing": Scope.NONE},
    "clear_reach": {"clear_reach": Scope.NONE},
    "max_object_bytes": {"max_object_bytes": 0},
    "max_batch_keys": {"max_batch_keys": 0},
    "max_key_bytes": {"max_key_bytes": 0},
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
    file = watched.__file__
    tests = [f"{file}::TestWatched::{name}" for name in runs(manifest())]
    parts = [tests[at::3] for at in range(3)]
    parts[0] += [f"{file}::TestWatchedUse", f"{file}::TestWatchedPeers"]
    run = partial(run_tests, environ=environ, timeout_s=600.0)
    with ThreadPoolExecutor(len(parts)) as pool:  # most tests only wait
        for ran in pool.map(run, parts):
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
