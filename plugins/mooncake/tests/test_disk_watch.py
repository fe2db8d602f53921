"""A full disk under spilled objects, which the library does not report."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock import AttachConfig
from kvdock_mooncake.disk_watch import DiskWatch
from kvdock_mooncake.pool import PoolHandle
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.spill import SpillDirectory

GIB = 1 << 30


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk of 100 GiB, of which nothing is used yet."""
    state = SimpleNamespace(free=100 * GIB, inodes=1000, error=None)

    def statvfs(_: str) -> Any:
        if state.error:
            raise state.error
        return SimpleNamespace(
            f_bavail=state.free // 4096,
            f_bfree=state.free // 4096,
            f_blocks=100 * GIB // 4096,
            f_frsize=4096,
            f_files=1000,
            f_favail=state.inodes,
        )

    monkeypatch.setattr("os.statvfs", statvfs)
    return state


def test_a_full_disk_is_logged_once_and_again_when_it_has_room(
    disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch = DiskWatch("/spilled")
    for free, full, lines in (
        (64 << 20, False, 0),
        ((64 << 20) - 4096, True, 1),
        (0, True, 1),
        (3 * GIB, False, 2),
        (4096, True, 3),
    ):
        disk.free = free
        watch.look()
        assert watch.full == full
        assert len(caplog.records) == lines
    assert "the disk of /spilled is full (64.0 MiB" in caplog.records[0].message
    assert "has room again (3" in caplog.records[1].message


def test_what_a_disk_has_is_the_capacity_of_a_process_that_spills(disk: Any) -> None:
    watch = DiskWatch("/spilled")
    disk.free = 30 * GIB
    watch.look()
    client: Any = SimpleNamespace(spill=None, settings=MooncakeSettings())
    nothing: Any = None
    store = PoolHandle(client, nothing, nothing, nothing)
    assert store.capacity() is None
    client.spill = SimpleNamespace(disk=watch)
    found = store.capacity()
    assert found is not None
    assert (found.used_bytes, found.limit_bytes) == (70 * GIB, 100 * GIB)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"inodes": 0}, "no inode is free"), ({"error": OSError("I/O error")}, "I/O")],
)
def test_a_disk_without_inodes_and_one_that_fails_count_as_full(
    given: dict[str, Any], why: str, disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in given.items():
        setattr(disk, name, value)
    watch = DiskWatch("/spilled")
    watch.look()
    assert watch.full
    assert why in caplog.text


def test_a_directory_is_watched_from_the_join_to_the_leave(
    tmp_path: Path, disk: Any, eventually: Any
) -> None:
    settings = MooncakeSettings(ssd_offload=True, ssd_path=str(tmp_path))
    folder = SpillDirectory.claim(settings, AttachConfig(process="me").process)

    def watching() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "kvdock-disk"}

    before = watching()
    folder.disk.every_s = 0.01
    folder.wait_for_previous_owner(0.0)
    assert len(watching() - before) == 1
    disk.free = 0
    eventually(lambda: folder.disk.full)
    folder.mark_clean()
    eventually(lambda: not watching() - before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 96 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=700", "kvdock", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_really_fills_up_is_noticed(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, spilled = DiskWatch(str(small_disk)), small_disk / "bucket"

    def full() -> bool:
        watch.look()
        return watch.full

    assert not full()
    spilled.write_bytes(bytes(60 << 20))
    assert full()
    assert watch.capacity is not None
    assert watch.capacity.used_bytes >= 60 << 20
    spilled.unlink()
    assert not full()
    assert len(caplog.records) == 2
