"""Tenants: names for salts, given in one of four ways and never shown."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvdock.config.core import CoreSettings
from kvdock.config.sources import explain, load_configuration
from kvdock.config.tenants import read_tenants, salt_digest, tenant_of
from kvdock.errors import SettingsError
from kvdock.namespace import Namespace, namespace_record

SALT = "a-secret-of-acme"


def record(salt: str) -> dict[str, object]:
    return namespace_record(Namespace(model="m", salt=salt), [])


def test_a_namespace_belongs_to_the_tenant_of_its_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_SALT", SALT)
    (tmp_path / "salt").write_text(f"{SALT}\n")
    for given in (
        {"salt": SALT},
        {"salt_env": "ACME_SALT"},
        {"salt_file": str(tmp_path / "salt")},
        {"salt_sha256": record(SALT)["salt_sha256"]},
    ):
        tenants = read_tenants({"acme": given})
        assert tenants == {"acme": salt_digest(SALT)}
        assert tenant_of(record(SALT), tenants) == "acme"
        for other in ("", f"{SALT}2"):
            assert tenant_of(record(other), tenants) == "default"


def test_listing_tenants_changes_no_namespace() -> None:
    assert record("")["salt_sha256"] == ""
    assert record("x")["salt_sha256"] == (
        "9d71ac2c4b84fb4aff55a2b759adc2dd2504e2aabf71e2703f1751f6bda26765"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"acme": {}}, "names not one salt"),
        ({"acme": {"salt": SALT, "salt_env": "X"}}, "names not one salt"),
        ({"acme": {"salt_env": "NOT_SET"}}, "empty or missing.*NOT_SET"),
        ({"acme": {"salt_file": "/nowhere/at/all"}}, "cannot be read: No such file"),
        ({"acme": {"salt_sha256": SALT}}, "not 64 digits"),
        ({"acme": {"sal": SALT}}, "unknown setting 'sal'"),
        ({"acme": 3}, "not made of settings"),
        ({"default": {"salt": SALT}}, "not a valid name"),
        ({"A b": {"salt": SALT}}, "not a valid name"),
        ({"a": {"salt": SALT}, "b": {"salt": SALT}}, "'a' and 'b' have one salt"),
        (SALT, "tenants is a section"),
    ],
)
def test_wrong_tenants_are_refused_without_showing_a_salt(
    given: object, said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read_tenants(given)
    assert SALT not in str(caught.value)


def test_tenants_are_a_section_and_reach_the_core_unseen() -> None:
    found = load_configuration(
        {"tenants": {"acme": {"salt": SALT}}},
        environ={"KVDOCK_TENANTS__OTHER__SALT": "of-another"},
    )
    assert set(found.core.tenants) == {"acme", "other"}
    # Settings are made anew from what was read.
    again = attrs.evolve(found.core, page_events=3)
    assert again.tenants == found.core.tenants
    shown = "".join(map(repr, explain(found, {}, environ={})))
    for secret in (SALT, "of-another", *found.core.tenants.values()):
        assert secret not in shown
        assert secret not in repr(found)
    assert CoreSettings().tenants == {}


def test_a_wrong_tenant_in_a_configuration_is_named_and_its_salt_is_not() -> None:
    wrong = {"a": {"salt": SALT}, "b": {"salt": SALT}}
    with pytest.raises(SettingsError, match="tenants") as caught:
        load_configuration({"tenants": wrong}, environ={})
    assert SALT not in str(caught.value)
