from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from kvdock.errors import ManifestError, PoolError
from kvdock.plugin.manifest import (
    API_VERSION,
    Capability,
    KindSupport,
    Manifest,
    Scope,
    Support,
)
from kvdock.pools.enums import HitPolicy, Layout, PoolKind, Sharding

if TYPE_CHECKING:
    from enum import StrEnum


@attrs.frozen
class WithPath:
    limit: int = 0
    folder: Path | None = None


@attrs.frozen
class WithoutPath:
    url: str = ""


def manifest(**changes: Any) -> Manifest:
    given: dict[str, Any] = {
        "name": "mine",
        "api": API_VERSION,
        "summary": "mine",
        "kinds": {PoolKind.MHA: KindSupport()},
    }
    return Manifest(**(given | changes))


def test_the_setting_that_is_a_path_is_found_by_its_type() -> None:
    assert manifest(settings=WithPath).path_setting == "folder"
    assert manifest(settings=WithoutPath).path_setting == ""
    assert manifest().path_setting == ""


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
        (
            {"kinds": {"mhaa": KindSupport()}},
            "unknown kind of pool, 'mhaa'. Did you mean 'mha'?",
        ),
        ({"max_batch_keys": -1}, "max_batch_keys is negative"),
        ({"settings": int}, "is not an attrs class"),
        ({"name": None}, "name is text, not None"),
        ({"summary": None}, "summary is text, not None"),
        ({"kinds": "mha"}, "kinds is not a mapping: 'mha'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ManifestError, PoolError), match=message):
        manifest(**changes)


OF_A_KIND: dict[str, type[StrEnum]] = {
    "hit_policies": HitPolicy,
    "layouts": Layout,
    "shardings": Sharding,
    "split_heads": Support,
    "draft": Support,
    "multi_buffer": Support,
}
OF_A_MANIFEST: dict[str, type[StrEnum]] = {
    one.name: type(one.default)
    for one in attrs.fields(Manifest)
    if isinstance(one.default, Support | Scope)
}
LIMITS = (
    "max_object_bytes",
    "max_batch_keys",
    "max_key_bytes",
    "max_send_rows",
    "landing_run_bytes",
)
SETS = ("hit_policies", "layouts", "shardings")


def declared(field: str, value: object) -> object:
    """Return what a field becomes, in whichever of the two records it is."""
    given: dict[str, Any] = {field: value}
    if field in OF_A_KIND:
        return getattr(KindSupport(**given), field)
    return getattr(manifest(**given), field)


@pytest.mark.parametrize(("field", "kind"), (OF_A_KIND | OF_A_MANIFEST).items())
def test_a_plain_word_becomes_the_member_that_it_names(
    field: str, kind: type[StrEnum]
) -> None:
    for member in kind:
        plain = [str(member.value)] if field in SETS else str(member.value)
        found = declared(field, plain)
        (one,) = found if isinstance(found, frozenset) else (found,)
        assert one is member


@pytest.mark.parametrize("field", OF_A_KIND | OF_A_MANIFEST)
@pytest.mark.parametrize("wrong", ["galaxy", True, False, None, 3])
def test_what_is_no_word_of_a_field_is_refused_by_the_field(
    field: str, wrong: object
) -> None:
    with pytest.raises(ManifestError, match=f"^{field}: {wrong!r} is not a "):
        declared(field, [wrong] if field in SETS else wrong)
    with pytest.raises(ManifestError, match=f"^{field}: {wrong!r} is not a "):
        declared(field, wrong)


@pytest.mark.parametrize("field", LIMITS)
@pytest.mark.parametrize("wrong", [1.5, "64 MiB", True, None])
def test_a_limit_that_is_no_number_is_refused_by_its_name(
    field: str, wrong: object
) -> None:
    with pytest.raises(
        ManifestError, match=f"^{field} is a whole number, not {wrong!r}"
    ):
        declared(field, wrong)


def test_a_kind_that_is_not_taken_supports_nothing() -> None:
    assert manifest().support(Capability.DRAFT, PoolKind.MLA) is Support.NO
    assert manifest().support(Capability.STORE, PoolKind.MHA) is Support.NATIVE
    assert manifest().support(Capability.DRAFT, PoolKind.MHA) is Support.UNDECLARED
