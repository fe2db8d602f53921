"""`kvdock store` on whatever keeps pages: a bucket, a directory, neither."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_server import ObjectServer, Stored

from kvdock import Namespace
from kvdock.errors import KvdockError, SettingsError
from kvdock.namespace import canonical, namespace_digest, namespace_record
from kvdock_cli.commands import store
from kvdock_cli.output import UsageProblem

RECORD = namespace_record(Namespace(model="tiny"), [])
NAMESPACE = namespace_digest(RECORD)
URL = "s3://kv/tests"


@pytest.fixture
def bucket() -> Iterator[ObjectServer]:
    """A bucket with three marks of one namespace."""
    server = ObjectServer("kv").start()
    now = server.now()
    for page in range(3):
        name = f"tests/{NAMESPACE}/{page:064x}.kv.L0-1"
        server.objects[name] = Stored(b"", now)
    name = f"tests/{NAMESPACE}/_namespace.json"
    server.objects[name] = Stored(canonical(RECORD), now)
    yield server
    server.stop()


def pairs(server: ObjectServer) -> tuple[str, ...]:
    given = server.settings()
    del given["url"]
    return tuple(f"{key}={value}" for key, value in given.items())


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    out = capsys.readouterr().out
    assert "hush-hush" not in out
    return json.loads(out)


def test_every_command_works_on_a_bucket(
    bucket: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    on = pairs(bucket)
    assert store.ls(URL, set_=on, json=True) == 0
    (one,) = said(capsys)["namespaces"]
    assert (one["namespace"], one["model"]) == (NAMESPACE, "tiny")
    assert store.stat(URL, namespace=NAMESPACE[:8], set_=on, json=True) == 0
    assert said(capsys)["namespace"]["pools"][0]["pages"] == 3
    assert store.verify(URL, set_=on, json=True) == 0
    assert said(capsys)["namespaces"][0]["good"] == 3
    assert store.gc(URL, older="1 h", set_=on, json=True) == 0
    assert said(capsys)["freed_bytes"] == {NAMESPACE: 0}
    assert store.rm(URL, namespace=NAMESPACE[:8], yes=True, set_=on, json=True) == 1
    (one,) = said(capsys)["removals"]
    assert (one["in_use"], one["goes"]) == (
        "a bucket does not show who has it open",
        False,
    )
    assert len(bucket.objects) == 4
    assert (
        store.rm(URL, namespace=NAMESPACE, yes=True, force=True, set_=on, json=True)
        == 0
    )
    assert said(capsys)["removals"][0]["goes"]
    assert [key.endswith(".json") for key in bucket.objects] == [True]


def test_damage_in_a_bucket_is_named_and_is_exit_code_1(
    bucket: ObjectServer, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{NAMESPACE}/{0:064x}.kv.L0-1"
    bucket.objects[f"tests/{name}"] = Stored(b"x" * 99, bucket.now())
    assert store.verify(URL, set_=pairs(bucket)) == 1
    out = capsys.readouterr().out
    assert f"{name} (corrupt), 99 B" in out


def test_settings_of_a_bucket_come_from_the_configuration(
    bucket: ObjectServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in bucket.settings().items():
        monkeypatch.setenv(f"KVDOCK_BACKENDS__S3__{key.upper()}", str(value))
    assert store.ls(URL, json=True) == 0
    assert said(capsys)["namespaces"]


def test_a_place_that_no_backend_knows_is_a_wrong_question() -> None:
    with pytest.raises(KvdockError, match="no installed backend keeps a store at"):
        store.ls("https://host/bucket")


def test_an_unknown_setting_is_rejected_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="quotta"):
        store.ls(str(tmp_path), set_=("quotta=1",))


def test_a_directory_deletes_nothing_by_age(tmp_path: Path) -> None:
    (tmp_path / NAMESPACE).mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    with pytest.raises(KvdockError, match="by use and not by age"):
        store.gc(str(tmp_path), older="1 h")


def test_without_any_store_the_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "GROUP", "kvdock.no-such-group")
    with pytest.raises(UsageProblem, match="no installed backend keeps a store"):
        store.ls("/somewhere")
