"""Namespaces that no process has open make way for those in use."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdock.batch import Batch, Operation
from kvdock_segments import DirectoryStore, WriterLiveness

OpenDepot = Callable[..., Any]
MIB = 1 << 20
PAGE_BYTES = 64 << 10
PAGES = range(480)
"""30 MiB: two releases fit into the disk of the tests, a third does not."""


def name_of(release: int) -> str:
    return hashlib.sha256(b"%d" % release).hexdigest()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 80 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m,mode=700", "kvdock", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def release(open_depot: OpenDepot, tmp_path: Path) -> OpenDepot:
    """Open the store of a release whose root has room for two of them."""

    def opened(number: int, root: Path = tmp_path / "kv", **more: Any) -> Any:
        more = {"segment_bytes": 4 * MIB} | more
        return open_depot(
            root, namespace=name_of(number), page_bytes=PAGE_BYTES, **more
        )

    return opened


def served(depot: Any) -> tuple[int, int]:
    """Store all pages; return how many were, and how many are found."""
    stored = sum(int(depot.put(PAGES[i : i + 16]).ok.sum()) for i in PAGES[::16])
    return stored, sum(depot.there(PAGES))


def age(root: Path, number: int, hours: float) -> None:
    """Have a release be unused for some time."""
    stamp_s = time.time() - hours * 3600
    for file in (root / name_of(number)).rglob("*"):
        os.utime(file, (stamp_s, stamp_s))


def test_the_third_release_on_a_disk_stores_and_finds_all_of_its_pages(
    release: OpenDepot, disk: Path
) -> None:
    for number in range(3):
        depot = release(number, disk / "kv", quota=40 * MIB)
        assert served(depot) == (len(PAGES), len(PAGES)), number
        depot.store.close()


def test_a_disk_without_room_for_a_folder_makes_room(
    release: OpenDepot, disk: Path
) -> None:
    root = disk / "kv"
    first = release(0, root)
    assert served(first) == (len(PAGES), len(PAGES))
    first.store.close()
    with (disk / "filler").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    second = release(1, root, segment_bytes=1 * MIB)
    assert served(second) == (len(PAGES), len(PAGES))


@pytest.mark.parametrize("first_ends", [True, False])
def test_a_namespace_is_open_until_the_last_of_its_stores_is_closed(
    release: OpenDepot, *, first_ends: bool
) -> None:
    one, other = release(0), release(0)
    ending, left = (one, other) if first_ends else (other, one)
    ending.store.close()
    assert DirectoryStore(left.root).in_use(name_of(0))
    left.store.close()
    assert not DirectoryStore(left.root).in_use(name_of(0))


def test_the_roots_quota_makes_way_as_the_disk_does(
    release: OpenDepot, tmp_path: Path
) -> None:
    for number in range(4):
        depot = release(number, root_quota=80 * MIB)
        assert served(depot) == (len(PAGES), len(PAGES)), number
        assert used_bytes(tmp_path) <= 80 * MIB
        capacity = depot.store.capacity()
        assert (capacity.limit_bytes, capacity.other_bytes) == (
            pytest.approx(80 * MIB, abs=MIB),
            pytest.approx(used_bytes(tmp_path) - capacity.used_bytes, abs=MIB),
        )
        depot.store.close()
    # The longest unused went first, as a whole.
    gone, part, *whole = (pages_of(tmp_path / "kv", number) for number in range(4))
    assert (gone, 0 < part < len(PAGES), whole) == (0, True, [len(PAGES)] * 2)
    assert name_of(0) not in DirectoryStore(tmp_path / "kv").namespaces()


def used_bytes(root: Path) -> int:
    return sum(one.stat().st_size for one in root.rglob("*") if one.is_file())


def pages_of(root: Path, number: int) -> int:
    store = DirectoryStore(root)
    if name_of(number) not in store.namespaces():
        return 0
    return sum(pool.pages for pool in store.survey(name_of(number)).pools)


def test_the_longest_unused_goes_first_whenever_it_was_stored(
    release: OpenDepot, tmp_path: Path
) -> None:
    root = tmp_path / "kv"
    for number in range(2):
        depot = release(number, root_quota=80 * MIB)
        served(depot)
        depot.store.close()
    age(root, 1, hours=2)
    assert served(release(2, root_quota=80 * MIB)) == (len(PAGES), len(PAGES))
    assert (pages_of(root, 0), pages_of(root, 1) < len(PAGES)) == (len(PAGES), True)


def test_a_namespace_that_is_open_keeps_its_pages(
    release: OpenDepot, tmp_path: Path
) -> None:
    open_ones = [release(number, root_quota=80 * MIB) for number in range(2)]
    for depot in open_ones:
        assert served(depot) == (len(PAGES), len(PAGES))
    age(tmp_path / "kv", 0, hours=100)
    late = release(2, root_quota=80 * MIB)
    served(late)
    assert [sum(depot.there(PAGES)) for depot in open_ones] == [len(PAGES)] * 2
    assert used_bytes(tmp_path) <= 80 * MIB


def test_a_namespace_that_is_opened_meanwhile_keeps_its_pages(
    release: OpenDepot,
) -> None:
    depot = release(0, root_quota=80 * MIB)
    served(depot)
    depot.store.close()
    late = release(1, root_quota=80 * MIB)
    late.store.capacity()  # it looks, and sees one that is not open
    again = release(0, root_quota=80 * MIB)
    elsewhere = late.store._allocator.elsewhere
    assert elsewhere.look().unused_bytes() > 0
    assert not elsewhere.evict_segment()
    assert sum(again.there(PAGES)) == len(PAGES)


def test_promised_pages_stay(release: OpenDepot, tmp_path: Path) -> None:
    depot = release(0, root_quota=80 * MIB)
    served(depot)
    kept = range(16)
    keep_until = int(time.time()) + 3600
    assert depot.put(kept, keep_until=keep_until).ok.all()
    retain = Batch(Operation.RETAIN, depot.keys(kept), keep_until=keep_until)
    assert depot.store.run(retain).ok.all()
    depot.store.close()
    for number in (1, 2, 3):
        depot = release(number, root_quota=80 * MIB)
        served(depot)
        depot.store.close()
    assert 16 <= pages_of(tmp_path / "kv", 0) < len(PAGES)
    again = release(0, root_quota=80 * MIB)
    assert again.there(kept) == [True] * len(kept)


@pytest.mark.parametrize(("hours", "stays"), [(23, True), (25, False)])
def test_without_locks_a_day_without_use_counts(
    release: OpenDepot, tmp_path: Path, hours: float, *, stays: bool
) -> None:
    first = release(0, liveness=WriterLiveness.TIMEOUT)
    served(first)
    first.store.close()
    age(tmp_path / "kv", 0, hours)
    more = {"liveness": WriterLiveness.TIMEOUT, "root_quota": 40 * MIB}
    assert (served(release(1, **more))[1] < len(PAGES)) == stays
    assert (pages_of(tmp_path / "kv", 0) == len(PAGES)) == stays


def test_a_full_namespace_takes_nothing_that_it_cannot_use(
    release: OpenDepot, tmp_path: Path
) -> None:
    first = release(0, root_quota=80 * MIB)
    served(first)
    first.store.close()
    second = release(1, quota=20 * MIB, root_quota=80 * MIB)
    served(second)
    served(second)
    assert pages_of(tmp_path / "kv", 0) == len(PAGES)


def test_a_disk_that_fails_costs_no_other_namespace(
    release: OpenDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = release(0)
    served(first)
    first.store.close()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    second = release(1)
    monkeypatch.setattr(type(second.store._engine), "preallocate", fail)
    assert served(second) == (0, 0)
    assert pages_of(tmp_path / "kv", 0) == len(PAGES)
