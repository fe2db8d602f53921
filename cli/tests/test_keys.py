"""`kvdock keys`: key files are made, listed, rotated and shredded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvdock.errors import SettingsError
from kvdock.wrappers.key_ring import KeyRing
from kvdock_cli.commands import keys
from kvdock_cli.output import UsageProblem

MASTER = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KV_MASTER_KEY", MASTER.hex())
    return tmp_path / "keys.json"


def states(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert keys.list_all(file, json=True) == 0
    out = capsys.readouterr().out
    assert MASTER.hex() not in out
    return [tuple(one.values()) for one in json.loads(out)["keys"]]


def test_keys_are_made_rotated_and_destroyed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys.make(file, "acme") == 0
    assert keys.make(file, "other") == 0
    with pytest.raises(UsageProblem, match="has a key"):
        keys.make(file, "acme")
    assert keys.rotate(file, "acme") == 0
    assert states(file, capsys) == [
        ("acme", "1", "opens"), ("other", "2", "seals"), ("acme", "3", "seals"),
    ]  # fmt: skip
    assert keys.destroy(file, "acme", number=1, yes=True) == 0
    assert keys.destroy(file, "acme", number=1, yes=True) == 1
    assert states(file, capsys)[0] == ("acme", "1", "destroyed")
    new = tmp_path / "new"
    new.write_bytes(bytes(32))
    assert keys.rotate(file, new_master_file=new) == 0
    assert KeyRing(file, bytes(32)).sealing("acme").number == 3
    assert keys.destroy(file, "acme", yes=True) == 0
    assert [one[2] for one in states(file, capsys)] == [
        "destroyed", "seals", "destroyed",
    ]  # fmt: skip


def test_what_makes_no_sense_is_refused_and_shows_no_key(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(file, "acme")
    with pytest.raises(UsageProblem, match="what to rotate"):
        keys.rotate(file)
    with pytest.raises(UsageProblem, match="what to rotate"):
        keys.rotate(file, "acme", new_master_file=file)
    with pytest.raises(UsageProblem, match="no key of tenant"):
        keys.rotate(file, "stranger")
    with pytest.raises(UsageProblem, match="no terminal"):
        keys.destroy(file, "acme")
    monkeypatch.setenv("KV_MASTER_KEY", MASTER.hex()[:-2])
    with pytest.raises(SettingsError) as caught:
        keys.rotate(file, "acme")
    assert MASTER.hex()[:16] not in str(caught.value)
