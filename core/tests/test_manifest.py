from __future__ import annotations

from typing import Any

import pytest

from kvdock.errors import ManifestError, PoolError
from kvdock.manifest import (
    API_VERSION,
    Capability,
    KindSupport,
    Manifest,
    Scope,
    Support,
)
from kvdock.pools import HitPolicy, PoolKind


def manifest(**changes: Any) -> Manifest:
    given: dict[str, Any] = {
        "name": "mine",
        "api": API_VERSION,
        "summary": "mine",
        "kinds": {PoolKind.MHA: KindSupport()},
    }
    return Manifest(**(given | changes))


def test_only_native_and_emulated_can_be_relied_on() -> None:
    assert [grade for grade in Support if grade] == [Support.EMULATED, Support.NATIVE]


def test_scopes_are_ordered_by_reach_and_not_by_spelling() -> None:
    order = ["none", "namespace", "process", "host", "cluster"]
    assert [str(scope) for scope in sorted(Scope, reverse=False)] == order
    assert Scope.HOST < Scope.CLUSTER
    assert Scope.CLUSTER > Scope.NAMESPACE
    assert Scope.NONE <= Scope.NONE >= Scope.NONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Mine"}, "not a valid backend name"),
        ({"kinds": {}}, "takes no kind of pool"),
        ({"kinds": {"mha": 3}}, "declares 'mha': 3"),
        ({"kinds": {"mhaa": KindSupport()}}, "declares 'mhaa'"),
        ({"max_batch_keys": -1}, "max_batch_keys is negative"),
        ({"settings": int}, "is no attrs class"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ManifestError, PoolError), match=message):
        manifest(**changes)


def test_a_word_that_the_core_does_not_know_is_refused() -> None:
    with pytest.raises(ManifestError, match="'sometimes' is not one of the hit_pol"):
        KindSupport(hit_policies=["sometimes"])  # type: ignore[list-item]  # as a stranger would
    assert HitPolicy.ALL_PAGES in KindSupport().hit_policies


def test_a_kind_that_is_not_taken_supports_nothing() -> None:
    assert manifest().support(Capability.DRAFT, PoolKind.MLA) is Support.NO
    assert manifest().support(Capability.STORE, PoolKind.MHA) is Support.NATIVE
    assert manifest().support(Capability.DRAFT, PoolKind.MHA) is Support.UNDECLARED
