"""A store attaches to a disk that is full, and stores as soon as there is room."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments.directory_store import DirectoryStore

OpenDepot = Callable[..., Any]
REFUSED, ABSENT, OK = int(Outcome.REFUSED), int(Outcome.ABSENT), int(Outcome.OK)


def fill_space(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096) == 4096:
            pass


def fill_inodes(disk: Path) -> None:
    with suppress(OSError):
        for number in range(1000):
            (disk / str(number)).touch()


@pytest.fixture(params=["space", "inodes"])
def full_disk(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Mount a small file system, full; the root of a store, and what makes room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=4m,nr_inodes=64,mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", size, "kvdock", str(disk)]
    if (
        os.geteuid()
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    if request.param == "space":
        fill_space(disk)
    else:
        fill_inodes(disk)

    def make_room() -> None:
        for path in disk.iterdir():
            if path.is_file():
                path.unlink()

    yield disk / "store", make_room
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_new_namespace_attaches_to_a_full_disk_and_stores_once_there_is_room(
    open_depot: OpenDepot,
    full_disk: tuple[Path, Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, make_room = full_disk
    depot = open_depot(root)
    for _ in range(4):
        assert set(depot.put(range(20)).outcomes.tolist()) == {REFUSED}
        assert depot.get(range(20)) == [ABSENT] * 20
        assert depot.there(range(20)) == [False] * 20
    depot.delete(range(20))
    assert depot.clear().ok.all()
    assert depot.store.usage().pages == 0
    assert depot.store.capacity().used_bytes == 0
    assert len(caplog.messages) < 12
    make_room()
    assert depot.put(range(20)).ok.all()
    assert depot.get(range(20)) == [OK] * 20
    assert open_depot(root).get(range(20)) == [OK] * 20


def test_what_waits_for_room_finds_what_another_process_stores(
    open_depot: OpenDepot, full_disk: tuple[Path, Callable[[], None]]
) -> None:
    root, make_room = full_disk
    waiting = open_depot(root)
    make_room()
    assert open_depot(root).put(range(20)).ok.all()
    assert waiting.get(range(20)) == [OK] * 20


def test_a_store_that_waited_for_room_can_be_closed_and_opened(
    open_depot: OpenDepot, full_disk: tuple[Path, Callable[[], None]]
) -> None:
    root, make_room = full_disk
    for _ in range(20):
        open_depot(root).store.close()
    make_room()
    assert open_depot(root).put(range(20)).ok.all()


def test_a_child_of_a_store_that_waits_for_room_stores_on_its_own(
    open_depot: OpenDepot, full_disk: tuple[Path, Callable[[], None]]
) -> None:
    root, make_room = full_disk
    depot = open_depot(root)
    make_room()
    child = os.fork()
    if not child:
        os._exit(0 if depot.put(range(20)).ok.all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert depot.get(range(20)) == [OK] * 20
    assert depot.put(range(20, 40)).ok.all()


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what keeps folders whose name begins so from being made."""
    make = os.mkdir

    def refuse(path: Any, *more: Any, **words: Any) -> None:
        if Path(path).name.startswith(beginning):
            raise OSError(28, "No space left on device", path)
        make(path, *more, **words)

    beginning = ""

    def begin(name: str) -> None:
        nonlocal beginning
        beginning = name
        monkeypatch.setattr(os, "mkdir", refuse)

    return begin


def test_a_new_pool_attaches_to_a_full_disk(
    open_depot: OpenDepot, no_folder: Callable[[str], None]
) -> None:
    open_depot().put(range(20))
    no_folder("draft.")
    draft = open_depot(pool="draft")
    assert set(draft.put(range(5)).outcomes.tolist()) == {REFUSED}
    assert open_depot().get(range(20)) == [OK] * 20
    # A clear reaches the pools that are there.
    assert draft.clear().ok.all()
    assert open_depot().there(range(20)) == [False] * 20
    wrong = Batch(Operation.CLEAR, ["../"])
    assert draft.store.run(wrong).outcomes.tolist() == [REFUSED]
    no_folder("nothing")
    assert draft.put(range(5)).ok.all()


def test_a_size_that_no_folder_can_be_made_for_is_refused(
    open_depot: OpenDepot, no_folder: Callable[[str], None]
) -> None:
    depot = open_depot()
    no_folder("kv.16384")
    memory = depot.pages(range(2)).reshape(1, -1)
    large = depot.batch(Operation.PUT, [1], memory)
    assert depot.store.run(large).outcomes.tolist() == [REFUSED]


def test_a_disk_without_inodes_refuses_puts_and_reads_go_on(
    open_depot: OpenDepot, full_disk: tuple[Path, Callable[[], None]]
) -> None:
    root, make_room = full_disk
    make_room()
    depot = open_depot(root)
    assert depot.put(range(20)).ok.all()
    fill_inodes(root.parent)
    again = open_depot(root)
    assert again.get(range(20)) == [OK] * 20
    assert REFUSED in again.put(range(100, 400)).outcomes.tolist()
    assert again.get(range(20)) == [OK] * 20
    assert len(DirectoryStore(root).namespaces()) == 1
