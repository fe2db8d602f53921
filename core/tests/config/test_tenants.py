"""Tenants: names for salts, given in one of four ways and never shown."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvdock.config.core import CoreSettings
from kvdock.config.sources import explain, load_configuration
from kvdock.config.tenants import (
    Tenants,
    read_tenants,
    salt_digest,
    tenant_number,
    tenant_of,
)
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


def test_each_tenant_is_read_in_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = 0

    def count(digest: str) -> int:
        nonlocal numbered
        numbered += 1
        return tenant_number(digest)

    monkeypatch.setattr("kvdock.config.tenants.tenant_number", count)
    listed = {f"t{at}": {"salt_sha256": f"{at + 1:064x}"[::-1]} for at in range(200)}
    assert len(read_tenants(listed)) == 200
    assert numbered <= 4 * 200


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
        ({"default": {"salt": SALT}}, "default: unknown setting 'salt'"),
        ({"default": SALT}, "not a valid name"),
        ({"default": {"retained_share": 2}}, "not a share"),
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


def test_a_file_of_tenants_is_refused_with_the_reason() -> None:
    given = {"acme": {"salt": SALT, "qota": "1 GiB"}}
    with pytest.raises(SettingsError) as caught:
        load_configuration({"tenants": given}, environ={}, origin="file f")
    assert str(caught.value) == (
        "core: tenants (file f): tenants.acme: unknown setting 'qota'. "
        "Did you mean 'quota'?"
    )


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


def test_a_tenant_has_a_number_that_follows_from_its_salt_alone() -> None:
    tenants = read_tenants({"acme": {"salt": SALT}, "b": {"salt": "x"}})
    renamed = read_tenants({"other": salt_digest(SALT)})
    number = tenants.number("acme")
    assert number == renamed.number("other") == tenants.number_of_salt(SALT)
    assert 0 < number < 2**32
    assert tenants.number_of_salt("") == tenants.number_of_salt("unlisted") == 0
    assert tenants.names == {0: "default", number: "acme", tenants.number("b"): "b"}
    assert tenant_number("0" * 64) == 1


def test_two_salts_with_one_number_are_refused() -> None:
    digest = salt_digest(SALT)
    twin = digest[:8] + "0" * 56
    with pytest.raises(SettingsError, match="one number") as caught:
        read_tenants({"a": digest, "b": twin})
    assert twin not in str(caught.value)


def test_room_is_read_for_listed_tenants_and_for_all_others() -> None:
    given = {
        "acme": {"salt": SALT, "quota": "2GiB", "retained_share": 0.25},
        "unbounded": {"salt": "x"},
        "default": {"quota": "1GiB"},
    }
    found = load_configuration({"tenants": given}, environ={}).core
    rooms = attrs.evolve(found, page_events=3).tenants.rooms
    assert {name: room.quota for name, room in rooms.items()} == {
        "acme": 2 << 30,
        "default": 1 << 30,
    }
    assert rooms["acme"].promise_bytes == 512 << 20
    assert set(found.tenants) == {"acme", "unbounded"}
    assert Tenants().rooms == {}
