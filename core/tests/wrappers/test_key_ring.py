"""Keys of tenants: numbered, wrapped, destroyed, and read again when they change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvdock.errors import KvdockError, SettingsError
from kvdock.wrappers import key_ring
from kvdock.wrappers.key_ring import (
    KeyProblem,
    KeyRing,
    KeyUnusableError,
    add_key,
    destroy_keys,
    list_keys,
    read_master_key,
    wrap_again,
)

MASTER = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "_CHECK_S", 0.0)


def problem(ring: KeyRing, tenant: str, number: int = 0) -> KeyProblem:
    with pytest.raises(KeyUnusableError) as caught:
        ring.opening(number) if number else ring.sealing(tenant)
    return caught.value.problem


def test_the_newest_key_seals_and_older_ones_still_open(path: Path) -> None:
    assert add_key(path, MASTER, "acme") == 1
    ring = KeyRing(path, MASTER)
    first = ring.sealing("acme")
    assert add_key(path, MASTER, "acme") == 2
    assert ring.sealing("acme").number == 2
    assert ring.opening(1).secret == first.secret
    assert ring.sealing("acme").secret != first.secret


def test_keys_of_two_tenants_differ_and_no_number_is_given_twice(path: Path) -> None:
    assert add_key(path, MASTER, "acme") == 1
    assert add_key(path, MASTER, "other") == 2
    ring = KeyRing(path, MASTER)
    assert ring.sealing("acme").secret != ring.sealing("other").secret
    assert problem(ring, "third") is KeyProblem.MISSING


def test_a_destroyed_key_is_gone_at_once_and_its_number_is_not_given_again(
    path: Path,
) -> None:
    add_key(path, MASTER, "acme")
    ring = KeyRing(path, MASTER)
    secret = ring.sealing("acme").secret
    assert destroy_keys(path, "acme") == 1
    assert destroy_keys(path, "acme") == 0
    assert problem(ring, "acme") is KeyProblem.DESTROYED
    assert add_key(path, MASTER, "acme") == 2
    assert ring.sealing("acme").secret != secret
    assert problem(ring, "acme", 1) is KeyProblem.DESTROYED
    # What the new key has sealed stays readable, whichever of them goes.
    destroy_keys(path, "acme", 2)
    with pytest.raises(KeyUnusableError):
        ring.reading("acme")
    add_key(path, MASTER, "acme")
    add_key(path, MASTER, "acme")
    destroy_keys(path, "acme", 4)
    ring.reading("acme")
    assert problem(ring, "acme") is KeyProblem.DESTROYED


def test_an_entry_cannot_be_moved_to_another_tenant_or_number(path: Path) -> None:
    add_key(path, MASTER, "acme")
    found = json.loads(path.read_text())
    for change in ({"tenant": "thief"}, {"id": 2}):
        path.write_text(json.dumps({"version": 1, "keys": [found["keys"][0] | change]}))
        ring = KeyRing(path, MASTER)
        tenant = str(change.get("tenant", "acme"))
        assert problem(ring, tenant) is KeyProblem.WRONG_MASTER


def test_a_new_master_key_opens_what_it_has_wrapped_again(path: Path) -> None:
    add_key(path, MASTER, "acme")
    secret = KeyRing(path, MASTER).sealing("acme").secret
    assert problem(KeyRing(path, OTHER), "acme") is KeyProblem.WRONG_MASTER
    with pytest.raises(KeyUnusableError):
        wrap_again(path, OTHER, MASTER)
    wrap_again(path, MASTER, OTHER)
    assert KeyRing(path, OTHER).sealing("acme").secret == secret
    assert problem(KeyRing(path, MASTER), "acme") is KeyProblem.WRONG_MASTER


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2, "keys": []}', "[]"])
def test_a_file_that_is_no_key_file_opens_nothing_and_is_not_replaced(
    path: Path, text: str
) -> None:
    add_key(path, MASTER, "acme")
    ring = KeyRing(path, MASTER)
    assert ring.sealing("acme").number == 1
    path.write_text(text)
    assert problem(ring, "acme") is KeyProblem.UNREADABLE
    with pytest.raises(KvdockError, match="not a key file"):
        add_key(path, MASTER, "acme")
    assert path.read_text() == text
    path.unlink()
    assert problem(ring, "acme") is KeyProblem.UNREADABLE


def test_the_key_file_is_its_owners_and_has_no_key_in_the_clear(path: Path) -> None:
    add_key(path, MASTER, "acme")
    assert path.stat().st_mode & 0o777 == 0o600
    secret = KeyRing(path, MASTER).sealing("acme").secret
    text = path.read_text()
    assert secret.hex() not in text
    assert MASTER.hex() not in text
    assert secret.hex() not in repr(KeyRing(path, MASTER).sealing("acme"))


def test_a_master_key_is_read_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "master"
    for data in (MASTER, MASTER.hex().encode(), MASTER.hex().encode() + b"\n"):
        file.write_bytes(data)
        assert read_master_key(file, "MY_KEY") == MASTER
    monkeypatch.setenv("MY_KEY", MASTER.hex())
    assert read_master_key(None, "MY_KEY") == MASTER
    monkeypatch.setenv("MY_KEY", "f00d" * 5)
    with pytest.raises(SettingsError, match="MY_KEY has no master key") as caught:
        read_master_key(None, "MY_KEY")
    assert "f00d" not in str(caught.value)
    with pytest.raises(SettingsError, match="No such file"):
        read_master_key(tmp_path / "none", "MY_KEY")


def test_a_changed_file_keeps_its_owner_group_and_mode(path: Path) -> None:
    add_key(path, MASTER, "acme")
    assert path.stat().st_mode & 0o777 == 0o600
    owner = (1234, 2345) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(path, *owner)
    for mode in (0o640, 0o440):
        path.chmod(mode)
        add_key(path, MASTER, "acme")
        destroy_keys(path, "acme", 1)
        wrap_again(path, MASTER, MASTER)
        about = path.stat()
        assert (about.st_uid, about.st_gid) == owner
        assert about.st_mode & 0o7777 == mode


def test_a_file_that_would_get_another_owner_is_not_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(path, MASTER, "acme")
    before = path.read_bytes()
    real = os.fstat

    def of_another(fd: int) -> os.stat_result:
        about = real(fd)
        return os.stat_result((*about[:4], about.st_uid + 1, *about[5:]))

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fstat", of_another)
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(KvdockError, match="another owner or group"):
        add_key(path, MASTER, "acme")
    assert path.read_bytes() == before
    assert {one.name for one in path.parent.iterdir()} == {
        path.name,
        f"{path.name}.lock",
    }


def test_a_link_to_a_key_file_stays_one(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "secrets" / "keys.json"
    real.parent.mkdir()
    add_key(real, MASTER, "acme")
    path.symlink_to(real)
    assert add_key(path, MASTER, "acme") == 2
    assert path.is_symlink()
    assert [number for _, number, _ in list_keys(real)] == [1, 2]
    assert KeyRing(path, MASTER).sealing("acme").number == 2


def test_keys_are_listed_without_what_is_secret(path: Path) -> None:
    add_key(path, MASTER, "acme")
    add_key(path, MASTER, "other")
    destroy_keys(path, "acme")
    assert list_keys(path) == [("acme", 1, True), ("other", 2, False)]
    with pytest.raises(KvdockError, match="cannot be read"):
        list_keys(path.with_name("none"))
