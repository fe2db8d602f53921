"""A damaged record, or a damaged `tenure`, costs nothing but a warning."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock_segments import (
    PosixIOEngine,
    SegmentStore,
    WriterLiveness,
    ownership,
)
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.paths import RECORD_NAME

OpenDepot = Callable[..., Any]
RECORD = b'{"model":"tiny"}'
NAMESPACE = hashlib.sha256(RECORD).hexdigest()


def truncate_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def fill_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "torn": lambda path: path.write_bytes(RECORD[:5]),
    "other": lambda path: path.write_bytes(b'{"model":"another"}'),
    "utf-16": lambda path: path.write_bytes(RECORD.decode().encode("utf-16")),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "huge": truncate_sparse,
    "directory": Path.mkdir,
    "full-directory": fill_directory,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dead-link": lambda path: path.symlink_to("/nowhere"),
}
KEPT_ASIDE = {"directory", "full-directory", "pipe", "link", "dead-link"}

damaged = pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in (RECORD_NAME, ownership.FILE_NAME) for kind in DAMAGE],
)


@pytest.fixture
def stored(open_depot: OpenDepot) -> Any:
    """A closed store of twenty pages with a record."""
    depot = open_depot(namespace=NAMESPACE, record=RECORD)
    assert depot.put(range(20)).ok.all()
    depot.store.close()
    return depot


def harm(depot: Any, name: str, kind: str) -> Path:
    path: Path = depot.root / NAMESPACE / name
    path.unlink()
    DAMAGE[kind](path)
    return path


def leftovers(depot: Any) -> list[Path]:
    return sorted((depot.root / NAMESPACE).glob("*.damaged"))


@damaged
def test_a_damaged_file_is_written_again_and_every_page_stays(
    open_depot: OpenDepot,
    stored: Any,
    name: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = harm(stored, name, kind)
    again = open_depot(namespace=NAMESPACE, record=RECORD)
    assert again.get(range(20)) == [0] * 20
    assert path.read_bytes() == (RECORD if name == RECORD_NAME else b"locks")
    assert len(leftovers(again)) == (kind in KEPT_ASIDE)
    (said,) = caplog.messages
    assert name in said
    assert "written again" in said
    assert DirectoryStore(again.root).survey(NAMESPACE).recorded


@damaged
def test_verifying_reports_a_damaged_file_and_clearing_deletes_it(
    open_depot: OpenDepot, stored: Any, name: str, kind: str
) -> None:
    path = harm(stored, name, kind)
    found = DirectoryStore(stored.root).verify(NAMESPACE)
    assert (found.good, found.damaged_files, found.ok) == (20, (path,), False)
    assert DirectoryStore(stored.root).clear(NAMESPACE)
    assert not os.path.lexists(path)
    assert DirectoryStore(stored.root).verify(NAMESPACE).ok
    again = open_depot(namespace=NAMESPACE, record=RECORD)
    assert again.put(range(20)).ok.all()
    assert path.is_file()


@damaged
def test_collecting_goes_on_and_deletes_a_damaged_file(
    open_depot: OpenDepot, stored: Any, name: str, kind: str
) -> None:
    path = harm(stored, name, kind)
    DirectoryStore(stored.root).collect(NAMESPACE)
    assert not os.path.lexists(path)
    again = open_depot(namespace=NAMESPACE, record=RECORD)
    assert again.get(range(20)) == [0] * 20


def test_what_was_set_aside_is_reported_until_it_is_collected(
    open_depot: OpenDepot, stored: Any
) -> None:
    harm(stored, RECORD_NAME, "full-directory")
    open_depot(namespace=NAMESPACE, record=RECORD).store.close()
    (aside,) = leftovers(stored)
    assert (aside / "inside").read_text() == "x"
    assert DirectoryStore(stored.root).verify(NAMESPACE).damaged_files == (aside,)
    DirectoryStore(stored.root).collect(NAMESPACE)
    assert not aside.exists()
    assert DirectoryStore(stored.root).verify(NAMESPACE).ok


def test_without_a_record_of_its_own_a_store_opens_beside_a_damaged_one(
    open_depot: OpenDepot, stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = harm(stored, RECORD_NAME, "other")
    again = open_depot(namespace=NAMESPACE)
    assert again.get(range(20)) == [0] * 20
    assert b"another" in path.read_bytes()
    assert "it is not used" in caplog.text


def test_clearing_through_an_open_store_writes_the_record_again(
    open_depot: OpenDepot, stored: Any
) -> None:
    again = open_depot(namespace=NAMESPACE, record=RECORD)
    path = harm(stored, RECORD_NAME, "directory")
    assert again.clear().ok.all()
    assert path.read_bytes() == RECORD


def test_a_record_that_cannot_be_written_stops_no_store(
    stored: Any,
    open_depot: OpenDepot,
    read_only: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (stored.root / NAMESPACE / RECORD_NAME).unlink()
    read_only()
    again = open_depot(namespace=NAMESPACE, record=RECORD)
    assert again.get(range(20)) == [0] * 20
    assert "Read-only file system" in caplog.text


def test_what_a_killed_process_left_of_a_file_is_collected_once_it_is_old(
    stored: Any,
) -> None:
    aside = stored.root / NAMESPACE / f".{RECORD_NAME}.{'0' * 16}"
    aside.write_bytes(b"{")
    DirectoryStore(stored.root).clear(NAMESPACE)
    DirectoryStore(stored.root).collect(NAMESPACE)
    assert aside.exists()
    os.utime(aside, (0, 0))
    assert DirectoryStore(stored.root).verify(NAMESPACE).damaged_files == (aside,)
    DirectoryStore(stored.root).collect(NAMESPACE)
    assert DirectoryStore(stored.root).namespaces() == ()


def test_two_stores_that_repair_at_once_leave_one_good_record(
    stored: Any, open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = harm(stored, RECORD_NAME, "directory")
    rename = os.rename

    def after_another(old: str, new: str, **more: Any) -> None:
        monkeypatch.setattr(os, "rename", rename)
        if new.endswith(".damaged"):
            open_depot(namespace=NAMESPACE, record=RECORD)
        rename(old, new, **more)

    monkeypatch.setattr(os, "rename", after_another)
    open_depot(namespace=NAMESPACE, record=RECORD)
    assert path.read_bytes() == RECORD
    DirectoryStore(stored.root).collect(NAMESPACE)
    assert DirectoryStore(stored.root).verify(NAMESPACE).ok


def test_without_locks_a_damaged_note_of_that_is_written_again(stored: Any) -> None:
    path = harm(stored, ownership.FILE_NAME, "directory")
    place = attrs.evolve(stored.store.place, liveness=WriterLiveness.TIMEOUT)
    SegmentStore(place, PosixIOEngine()).close()
    assert path.read_bytes() == b"silence"
