"""Quota, eviction and floors."""

import errno
import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvdock.batch import Outcome
from kvdock.errors import SettingsError
from kvdock_segments import PosixIOEngine, elsewhere, ownership, walk

OpenDepot = Callable[..., Any]
QUOTA = 2 << 20
OTHER = hashlib.sha256(b"another namespace").hexdigest()


def files_bytes(folder: Path) -> int:
    """Add up sizes of files, some of which may be renamed in the background."""
    known = -1
    while True:
        with suppress(FileNotFoundError):
            every = [path.stat() for path in folder.rglob("*.*/*")]
            found = sum({one.st_ino: one.st_size for one in every}.values())
            if found == known:
                return found
            known = found


def test_a_namespace_stays_within_its_quota(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    for start in range(0, 2000, 50):
        assert depot.request(range(start, start + 50)).ok.all()
        assert files_bytes(depot.root) <= QUOTA
    assert depot.store.usage().namespace_bytes == files_bytes(depot.root)
    assert depot.there(range(1950, 2000)) == [True] * 50
    assert not any(depot.there(range(1000)))


def test_recycling_keeps_the_files_that_are_there(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    depot.put(range(300))
    before = {path.name for path in depot.root.glob("*/*/*.dat")}
    for start in range(300, 900, 50):
        assert depot.request(range(start, start + 50)).ok.all()
    after = {path.name for path in depot.root.glob("*/*/*.dat")}
    assert before <= after
    assert depot.store.counts["segments_recycled"] > 0


def test_pages_in_use_outlive_unused_ones(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    hot = list(range(0, 200, 20))
    depot.put(range(200))
    for start in range(1000, 2000, 25):
        depot.put(range(start, start + 25))
        assert depot.get(hot) == [0] * len(hot)
    assert depot.store.counts["pages_evicted"] > 500


def test_a_write_of_stored_pages_counts_as_use_and_a_lookup_does_not(
    open_depot: OpenDepot,
) -> None:
    # The two groups of pages lie in different segments.
    hot, asked = range(40), range(100, 140)
    depot = open_depot(quota=QUOTA)
    depot.put(range(200))
    lost = 0
    for start in range(1000, 2000, 25):
        depot.there(asked)
        lost += depot.there(hot).count(False)
        depot.put(hot)
        depot.put(range(start, start + 25))
    # At most one segment: its time of use is the mean of its pages.
    assert lost < len(hot)
    assert not any(depot.there(asked))


def test_times_of_use_survive_a_restart(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=QUOTA)
    hot = list(range(0, 200, 20))
    depot.put(range(200))
    depot.get(hot)
    depot.store.close()
    again = open_depot(quota=QUOTA)
    again.put(range(1000, 1080))
    assert again.there(hot) == [True] * len(hot)


def test_eviction_never_touches_another_namespace(open_depot: OpenDepot) -> None:
    other = open_depot(namespace=OTHER)
    other.put(range(100))
    depot = open_depot(quota=QUOTA)
    for start in range(0, 1000, 50):
        depot.put(range(start, start + 50))
    assert other.get(range(100)) == [0] * 100


def test_pools_of_one_namespace_share_its_quota(open_depot: OpenDepot) -> None:
    first = open_depot(quota=QUOTA)
    second = open_depot(quota=QUOTA, pool="draft", page_bytes=4096)
    for start in range(0, 1000, 50):
        assert first.request(range(start, start + 50)).ok.all()
    for start in range(0, 400, 50):
        assert second.request(range(start, start + 50)).ok.all()
        assert files_bytes(first.root) <= QUOTA
    assert second.there(range(350, 400)) == [True] * 50


def test_a_page_that_can_never_fit_evicts_nothing(open_depot: OpenDepot) -> None:
    limits = {"quota": 1 << 20, "segment_bytes": 1 << 16}
    small = open_depot(**limits)
    small.put(range(60))
    large = open_depot(pool="large", page_bytes=2 << 20, free_space=1 << 60)
    assert large.put([1]).outcomes.tolist() == [Outcome.REFUSED]
    assert all(small.there(range(60)))
    assert all(open_depot().there(range(60)))


def test_a_quota_below_one_page_is_rejected(open_depot: OpenDepot) -> None:
    least = 8192 + 200
    with pytest.raises(SettingsError, match=f"no room for one.*{least} bytes"):
        open_depot(quota=least - 1)
    assert open_depot(quota=least).put([1]).ok.all()


def test_lack_of_room_is_logged_less_and_less_often(
    open_depot: OpenDepot, caplog: pytest.LogCaptureFixture
) -> None:
    open_depot(namespace=OTHER).put(range(100))
    depot = open_depot(free_space=1 << 60)
    for number in range(20):
        assert list(depot.put([number]).outcomes) == [Outcome.REFUSED]
    refused = depot.store.counts["segments_refused"]
    assert refused == 20
    assert len(caplog.records) == refused.bit_length()
    said = caplog.messages[0]
    assert str(depot.root) in said
    assert "stay free (free_space)" in said
    assert f"kvdock store gc {depot.root} --namespace {OTHER[:12]}" in said


def test_other_namespaces_are_measured_once_for_many_refused_puts(
    open_depot: OpenDepot,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = [hashlib.sha256(bytes([number])).hexdigest() for number in range(5)]
    for namespace in others:
        open_depot(namespace=namespace).put(range(10))
    depot = open_depot(free_space=1 << 60)
    monkeypatch.setattr(elsewhere, "_LOOK_S", 1e6)
    looks = Mock(wraps=walk.list_segments)
    monkeypatch.setattr(walk, "list_segments", looks)
    for number in range(20):
        assert list(depot.put([number]).outcomes) == [Outcome.REFUSED]
    assert looks.call_count == len(others)
    assert "which takes 0 B" in caplog.text
    assert "5 namespaces take" in caplog.text


def test_a_quota_that_leaves_no_room_is_named(
    open_depot: OpenDepot, caplog: pytest.LogCaptureFixture
) -> None:
    depot = open_depot(quota=1 << 20)
    assert depot.put(range(100)).ok.all()
    foreign = depot.where(0).path.with_name("stray")
    foreign.write_bytes(bytes(4 << 20))
    other = open_depot(pool="draft", page_bytes=1 << 19, quota=1 << 20)
    assert list(other.put([1]).outcomes) == [Outcome.REFUSED]
    assert "its quota is 1.0 MiB" in caplog.text


def test_two_stores_on_one_root_keep_one_quota(open_depot: OpenDepot) -> None:
    depots = [open_depot(quota=QUOTA) for _ in range(2)]
    for start in range(0, 1000, 20):
        for number, depot in enumerate(depots):
            first = 10_000 * number + start
            assert depot.put(range(first, first + 20)).ok.all()
            assert depot.get(range(first, first + 20)) == [0] * 20
    assert files_bytes(depots[0].root) <= QUOTA


def test_a_segment_whose_reserved_byte_is_locked_is_not_recycled(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA)
    depot.put(range(200))
    with depot.where(3).record_path.open("rb") as index:
        assert ownership._set(index.fileno(), fcntl.F_RDLCK, ownership._PIN)
        other = open_depot(quota=QUOTA)
        for start in range(1000, 3000, 25):
            other.put(range(start, start + 25))
        assert depot.get([3]) == [0]
    for start in range(3000, 5000, 25):
        other.put(range(start, start + 25))
    assert depot.there([3]) == [False]


def test_the_floor_of_free_space_refuses_puts(open_depot: OpenDepot) -> None:
    depot = open_depot(free_space=1 << 60)
    assert set(depot.put(range(5)).outcomes.tolist()) == {int(Outcome.REFUSED)}
    assert depot.store.counts["put_refused"] == 5
    assert depot.there(range(5)) == [False] * 5


def test_deleted_pages_give_their_slots_back(open_depot: OpenDepot) -> None:
    depot = open_depot()
    for _ in range(20):
        depot.put(range(100))
        depot.delete(range(100))
    assert depot.store.counts["segments_created"] <= 5
    assert depot.there(range(100)) == [False] * 100


def test_clear_reaches_all_pools_of_the_namespace_and_no_other(
    open_depot: OpenDepot,
) -> None:
    other = open_depot(namespace=OTHER)
    draft = open_depot(pool="draft")
    depot = open_depot()
    for each in (other, draft, depot):
        each.put(range(10))
    assert depot.clear().ok.all()
    assert depot.there(range(10)) == [False] * 10
    end = time.monotonic() + 60  # a store may look at others' changes a moment later
    while any(draft.there(range(10))) and time.monotonic() < end:
        time.sleep(0.001)
    assert draft.there(range(10)) == [False] * 10
    assert other.get(range(10)) == [0] * 10
    assert depot.put(range(10)).ok.all()
    assert depot.get(range(10)) == [0] * 10


def test_only_the_own_namespace_can_be_cleared(open_depot: OpenDepot) -> None:
    from kvdock.batch import Batch, Operation

    other = open_depot(namespace=OTHER)
    other.put(range(3))
    depot = open_depot()
    for prefix in (f"{OTHER}/", "", "../", depot.store.place.namespace[:10]):
        result = depot.store.run(Batch(Operation.CLEAR, [prefix]))
        assert result.outcomes.tolist() == [int(Outcome.REFUSED)]
    assert other.get(range(3)) == [0] * 3


def fill(path: Path) -> None:
    """Use up all free space."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096) == 4096:
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "kvdock", str(disk)]
    if (
        os.geteuid()
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_refuses_puts_and_reads_go_on(
    open_depot: OpenDepot, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (5 << 20))
    depot = open_depot(small_disk / "store", segment_bytes=1 << 20)
    depot.put(range(100))
    stored = [n for n, there in enumerate(depot.there(range(100))) if there]
    assert stored
    fill(small_disk / "more")
    assert depot.get(stored) == [0] * len(stored)
    # Full segments are recycled; new ones do not fit.
    depot.put(range(1000, 1300))
    now = [n for n in [*range(100), *range(1000, 1300)] if depot.there([n]) == [True]]
    assert depot.get(now) == [0] * len(now)
    assert now


def test_a_disk_without_any_room_comes_back(
    open_depot: OpenDepot, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    depot = open_depot(small_disk / "store")
    fill(filler)
    assert set(depot.put(range(20)).outcomes.tolist()) == {int(Outcome.REFUSED)}
    assert depot.store.counts["put_refused"] == 20
    filler.unlink()
    assert depot.put(range(20)).ok.all()
    assert depot.get(range(20)) == [0] * 20


def test_a_disk_that_fails_each_put_does_not_fill_the_log(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    depot = open_depot()

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(PosixIOEngine, "open_file", fail)
    for number in range(20):
        assert list(depot.put([number]).outcomes) == [Outcome.REFUSED]
    failed = depot.store.counts["segments_failed"]
    assert failed >= 20
    assert 1 <= len(caplog.records) <= failed.bit_length()


def test_a_pool_that_is_read_is_not_deleted_for_a_colder_one(
    open_depot: OpenDepot,
) -> None:
    busy = open_depot(pool="busy", quota=6 << 20)
    read = open_depot(pool="read", quota=6 << 20)
    read.put(range(200))
    for first in range(200, 700, 50):
        busy.request(range(first, first + 50))
    for first in range(1000, 2200, 60):
        assert not any(read.get(range(200)))
        read.store._catalog.flush_uses()  # as it does every ten seconds
        busy.request(range(first, first + 60))
    assert all(read.there(range(200)))
    assert busy.store.counts["segments_recycled"] > 0


def test_a_second_change_within_a_clock_tick_is_seen(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put([1])
    (folder,) = depot.root.glob("*/kv.*")
    # Ahead of the clock, so that it is fresh however long the next lines take.
    tick_ns = folder.stat().st_mtime_ns + 60_000_000_000
    os.utime(folder, ns=(tick_ns, tick_ns))
    before = depot.store.usage().namespace_bytes
    (folder / "beside").write_bytes(bytes(1000))
    os.utime(folder, ns=(tick_ns, tick_ns))  # the resolution of most kernels
    assert depot.store.usage().namespace_bytes == before + 1000


def test_what_has_no_room_is_refused_with_that_as_its_cause(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot(quota=QUOTA)
    numbers = range(2 * QUOTA // 8192)
    results = [depot.put(numbers[at : at + 16]) for at in numbers[::16]]
    assert not results[0].cause
    depot.there(numbers)
    whole = depot.put(numbers)
    assert (whole.ok.all(), whole.cause) == (False, "full")
