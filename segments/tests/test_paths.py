"""Roots, namespaces and names, hostile ones included."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock.batch import Batch, Operation
from kvdock.errors import KvdockError, NamespaceError
from kvdock.testing.open_files import open_files
from kvdock_segments import PosixIOEngine, SegmentStore, StoreLocation, paths
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.namespace_files import read_record
from kvdock_segments.ownership import FILE_NAME, WriterLiveness
from kvdock_segments.paths import (
    RECORD_NAME,
    IndexName,
    open_namespace,
    open_root,
    pool_folder,
)

OpenDepot = Callable[..., Any]
RECORD = b'{"model":"tiny"}'
NAMESPACE = hashlib.sha256(RECORD).hexdigest()


def place(root: Path, namespace: str = NAMESPACE, record: bytes = b"") -> StoreLocation:
    return StoreLocation(
        root=root, namespace=namespace, pool="kv", object_bytes=(64,), record=record
    )


def test_everything_in_a_store_is_private_to_its_user(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(5))
    for path in [depot.root, *depot.root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_root_that_others_can_write_is_rejected(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(KvdockError, match="others could plant pages"):
        open_root(root)
    os.close(open_root(root, shared=True))


def test_a_root_of_another_user_is_rejected(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(root, 12345, -1)
    with pytest.raises(KvdockError, match="belongs to user 12345"):
        open_root(root)


def test_missing_parents_of_a_root_are_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(open_root(tmp_path / "a" / "b" / "root"))
    finally:
        os.umask(before)
    for folder in ("a", "a/b", "a/b/root"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_a_root_as_deep_as_a_path_can_be_is_made(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * ((4000 - len(str(tmp_path))) // 2))
    os.close(open_root(deep))
    with pytest.raises(KvdockError, match="File name too long"):
        open_root(deep / ("d" * 200))
    while deep != tmp_path:  # it is too deep for pytest
        deep.rmdir()
        deep = deep.parent


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o777, True), (0o1777, False), (0o770, False)]
)
def test_a_root_below_a_folder_of_everyone_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, *, warned: bool
) -> None:
    exposed = tmp_path / "exposed"
    exposed.mkdir()
    exposed.chmod(mode)
    here = place(exposed / "ours" / "root", record=RECORD)
    SegmentStore(here, PosixIOEngine()).close()
    assert (f"everyone may write {exposed}" in caplog.text) is warned
    caplog.clear()
    shared = attrs.evolve(here, shared=True)
    SegmentStore(shared, PosixIOEngine()).close()
    assert not caplog.text


def test_a_root_that_is_a_link_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(KvdockError, match="cannot be opened"):
        open_root(tmp_path / "link")


def test_a_namespace_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (root / NAMESPACE).symlink_to(outside)
    with pytest.raises(KvdockError, match="Not a directory"):
        SegmentStore(place(root), PosixIOEngine())
    assert not list(outside.iterdir())


@pytest.mark.parametrize("what", [".", "kv.8", "kv.16"])
def test_what_cannot_be_opened_is_named_and_leaves_nothing_open(
    tmp_path: Path, what: str
) -> None:
    home = tmp_path / NAMESPACE
    if what == ".":
        home.symlink_to("/nowhere")
    else:
        home.mkdir(mode=0o700)
        (home / what).symlink_to("/nowhere")
    tmp_path.chmod(0o700)
    two = attrs.evolve(place(tmp_path), object_bytes=(8, 16))
    before = open_files()
    for _ in range(2):
        with pytest.raises(KvdockError, match=r"cannot be opened.*Let this user"):
            SegmentStore(two, PosixIOEngine())
    assert not open_files() - before


def test_segments_that_are_links_are_not_followed(
    open_depot: OpenDepot, tmp_path: Path
) -> None:
    depot = open_depot()
    depot.put(range(3))
    data = depot.where(0).path
    depot.store.close()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * data.stat().st_size)
    data.unlink()
    data.symlink_to(secret)
    again = open_depot()
    assert 0 not in again.get(range(3))
    again.put(range(3))
    assert set(secret.read_bytes()) == {ord("s")}


@pytest.mark.parametrize(
    "name", ["", "..", "../" * 20, "a" * 63, "A" * 64, "a" * 65, "a" * 63 + "/"]
)
def test_only_a_digest_is_a_namespace(tmp_path: Path, name: str) -> None:
    with pytest.raises(NamespaceError, match="is not a namespace"):
        SegmentStore(place(tmp_path / "root", namespace=name), PosixIOEngine())
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("pool", ["", "..", "a/b", "a.b", "A", "a\n", "x" * 49])
def test_only_a_pool_name_makes_a_folder(pool: str) -> None:
    with pytest.raises(NamespaceError, match="not the name of a pool"):
        pool_folder(pool, 64)


def test_hostile_keys_stay_in_the_store(open_depot: OpenDepot) -> None:
    depot = open_depot()
    keys = ["../../x", "/etc/passwd", "a\0b", "é" * 300, "\n", "x" * 100_000, ""]
    memory = depot.pages(range(len(keys)))
    batch = depot.batch(Operation.PUT, range(len(keys)), memory)
    hostile = Batch(Operation.PUT, keys, batch.addresses, batch.sizes)
    assert depot.store.run(hostile).ok.all()
    assert depot.store.run(Batch(Operation.EXISTS, keys)).ok.all()
    (pool,) = depot.root.glob("*/kv.*")
    notes = pool.parent / FILE_NAME
    files = {path for path in depot.root.rglob("*") if path.is_file()} - {notes}
    assert {path.parent for path in files} == {pool}


def test_the_record_of_a_namespace_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "root"
    SegmentStore(place(root, record=RECORD), PosixIOEngine()).close()
    kept = root / NAMESPACE / "namespace.json"
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == NAMESPACE


def test_a_record_of_another_namespace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NamespaceError, match="does not match"):
        SegmentStore(place(tmp_path / "root", record=b"{}"), PosixIOEngine())


def test_a_namespace_without_a_record_can_be_opened(tmp_path: Path) -> None:
    root = open_root(tmp_path / "root")
    fd = open_namespace(root, NAMESPACE)
    assert read_record(fd) == b""
    os.close(fd)
    os.close(root)


def test_names_of_index_files_are_read_as_they_are_spelled() -> None:
    name = IndexName(2**64 - 1, 7, "open")
    assert IndexName.parse(str(name)) == name
    for wrong in ("x", "0" * 16 + ".dat", f"{name}.tmp", "../" + str(name)):
        assert IndexName.parse(wrong) is None


@pytest.mark.parametrize("stray", ["file", "link", "pipe"])
def test_other_entries_with_names_of_the_store_are_ignored(
    open_depot: OpenDepot, stray: str
) -> None:
    depot = open_depot()
    assert depot.put(range(20)).ok.all()
    (pool,) = depot.root.glob("*/kv.*")
    make: Callable[[Path], object] = {
        "file": Path.touch,
        "link": lambda path: path.symlink_to("/etc"),
        "pipe": os.mkfifo,
    }[stray]
    for name in ("0123456789abcdef.00000001.idx", "0123456789abcdef.dat"):
        make(pool / name)
    make(pool.parent / "kv.100")
    make(pool.parent / "draft.4096")
    make(depot.root / ("ab" * 32))
    namespace = depot.store.place.namespace
    assert DirectoryStore(depot.root).namespaces() == (namespace,)
    assert [
        (one.pool, one.pages)
        for one in DirectoryStore(depot.root).survey(namespace).pools
    ] == [("kv", 20)]
    assert DirectoryStore(depot.root).verify(namespace).good == 20
    fresh = open_depot()
    assert fresh.get(range(20)) == [0] * 20
    assert fresh.put(range(20, 40)).ok.all()
    DirectoryStore(depot.root).collect(namespace, to_bytes=1 << 30)
    assert fresh.get(range(40)) == [0] * 40
    assert DirectoryStore(depot.root).clear(namespace)


def test_directories_in_place_of_files_are_cleared(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(100))
    depot.store.close()
    spots = [depot.where(0), depot.where(99)]
    for path in (spots[0].path, spots[1].record_path):
        path.unlink()
        path.mkdir()
        (path / "inside").touch()
    assert 0 in open_depot().get(range(100))
    namespace = depot.store.place.namespace
    assert DirectoryStore(depot.root).clear(namespace)
    assert not list(spots[0].path.parent.iterdir())
    assert open_depot().put(range(100)).ok.all()


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere")]
)
def test_what_is_in_place_of_pages_does_not_keep_a_torn_index_in_the_quota(
    open_depot: OpenDepot, make: Callable[[Path], object]
) -> None:
    depot = open_depot(quota=1 << 20)
    depot.put(range(100))
    depot.store.close()
    torn = depot.where(0)
    torn.record_path.write_bytes(bytes(1 << 20))
    torn.path.unlink()
    make(torn.path)
    again = open_depot(quota=1 << 20)
    assert again.put(range(100)).ok.all()
    assert again.get(range(100)).count(0) > 80
    assert not torn.record_path.exists()


def test_a_pipe_among_the_pages_is_a_miss(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(6))
    path = depot.where(0).path
    depot.store.close()
    path.unlink()
    os.mkfifo(path)
    again = open_depot()
    assert 0 not in again.get(range(6))
    assert again.put(range(6)).ok.all()
    assert again.get(range(6)) == [0] * 6


def test_a_store_that_cannot_be_read_is_a_kvdock_error(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(3))

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", "kv.8192")

    monkeypatch.setattr(paths, "open_folder", refuse)
    with pytest.raises(KvdockError, match="cannot be worked on: Permission denied"):
        DirectoryStore(depot.root).survey(depot.store.place.namespace)


def test_an_empty_namespace_is_removed_once_no_store_has_it_open(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.clear()
    namespace = depot.store.place.namespace
    (depot.root / namespace / RECORD_NAME).write_bytes(b"{}")
    DirectoryStore(depot.root).collect(namespace)
    assert DirectoryStore(depot.root).namespaces() == (namespace,)
    assert depot.put(range(20)).ok.all()
    assert depot.get(range(20)) == [0] * 20
    depot.store.close()
    DirectoryStore(depot.root).collect(namespace)
    assert DirectoryStore(depot.root).namespaces() == (namespace,)
    DirectoryStore(depot.root).clear(namespace)
    stray = depot.root / namespace / "stray"
    stray.touch()
    DirectoryStore(depot.root).collect(namespace)
    assert DirectoryStore(depot.root).namespaces() == (namespace,)
    stray.unlink()
    DirectoryStore(depot.root).collect(namespace)
    assert DirectoryStore(depot.root).namespaces() == ()
    assert open_depot().put(range(20)).ok.all()


def test_without_locks_an_empty_namespace_stays(open_depot: OpenDepot) -> None:
    depot = open_depot(liveness=WriterLiveness.TIMEOUT)
    namespace = depot.store.place.namespace
    depot.store.close()
    DirectoryStore(depot.root).collect(namespace)
    assert DirectoryStore(depot.root).namespaces() == (namespace,)


def test_a_namespace_removed_while_it_is_opened_is_created_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.store.close()
    namespace = depot.store.place.namespace
    opened = paths.open_folder

    def open_late(parent: int, name: str, *, create: bool = False) -> int:
        fd = opened(parent, name, create=create)
        if name == namespace and create:
            monkeypatch.setattr(paths, "open_folder", opened)
            DirectoryStore(depot.root).collect(namespace)
            assert DirectoryStore(depot.root).namespaces() == ()
        return fd

    monkeypatch.setattr(paths, "open_folder", open_late)
    again = open_depot()
    assert again.put(range(20)).ok.all()
    assert open_depot().get(range(20)) == [0] * 20


@pytest.mark.parametrize("record", [b"[]", b"\xff", b"{", b"[" * 100_000, None])
def test_a_record_that_is_not_an_object_describes_nothing(
    tmp_path: Path, record: bytes | None
) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / hashlib.sha256(record or b"").hexdigest()
    folder.mkdir()
    if record is None:
        (folder / "namespace.json").symlink_to("/etc/passwd")
    else:
        (folder / "namespace.json").write_bytes(record)
    seen = DirectoryStore(tmp_path).survey(folder.name)
    assert (seen.model, seen.recorded) == ("", False)
