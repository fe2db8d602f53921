"""What is known of USRBIO, held against the fake; and that the fake is unkind."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

SIZE = 4096
SHM = Path("/dev/shm")  # noqa: S108 - where links of iovs lead to


class Memory:
    """Shared memory as `make_iovec` takes it."""

    def __init__(self, nbytes: int) -> None:
        self.name = f"fake-test-{os.urandom(8).hex()}"
        self.path = SHM / self.name
        self.path.write_bytes(bytes(nbytes))
        self.buf = np.memmap(self.path, np.uint8, "r+")


@pytest.fixture
def shm() -> Iterator[Memory]:
    one = Memory(16 * SIZE)
    yield one
    one.path.unlink(missing_ok=True)


@pytest.fixture
def iov(fake: Any, mount: Path, shm: Memory) -> Any:
    return fake.make_iovec(shm, str(mount))


@pytest.fixture
def fd(fake: Any, mount: Path) -> Iterator[int]:
    """A registered file of eight pages, each full of its number."""
    fd = os.open(mount / "data", os.O_RDWR | os.O_CREAT)
    for number in range(8):
        os.pwrite(fd, bytes([number + 1]) * SIZE, number * SIZE)
    fake.register_fd(fd)
    yield fd
    fake.deregister_fd(fd)
    os.close(fd)


def reader(fake: Any, mount: Path, entries: int = 8, **more: Any) -> Any:
    return fake.make_ioring(str(mount), entries, True, **more)


def test_an_iov_is_a_link_to_shared_memory_that_may_be_unlinked_at_once(
    fake: Any, mount: Path, shm: Memory, fd: int
) -> None:
    iov = fake.make_iovec(shm, str(mount), 4096)
    (link,) = (mount / "3fs-virt/iovs").iterdir()
    assert link.readlink() == SHM / shm.name
    assert link.suffix == ".b4096"
    shm.path.unlink()
    ring = reader(fake, mount)
    ring.prepare(iov[:SIZE], True, fd, 0)
    assert ring.submit().wait(min_results=1)[0].result == SIZE
    assert (shm.buf[:SIZE] == 1).all()
    del iov
    assert not link.is_symlink()


def test_memory_that_the_daemon_does_not_see_is_no_iov(
    fake: Any, mount: Path, shm: Memory
) -> None:
    shm.path.unlink()
    with pytest.raises(FileNotFoundError):
        fake.make_iovec(shm, str(mount))


def test_an_operation_stays_within_a_block_of_its_iov(
    fake: Any, mount: Path, shm: Memory, fd: int
) -> None:
    iov = fake.make_iovec(shm, str(mount), SIZE)
    ring = reader(fake, mount)
    ring.prepare(iov[SIZE : 2 * SIZE], True, fd, 0)
    with pytest.raises(OSError, match="block") as raised:
        ring.prepare(iov[SIZE // 2 : SIZE + 1], True, fd, 0)
    assert raised.value.errno == errno.EINVAL


def test_descriptors_are_registered_once_and_only_on_3fs(
    fake: Any, mount: Path, iov: Any, fd: int, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="already") as raised:
        fake.register_fd(fd)
    assert raised.value.errno == errno.EINVAL
    elsewhere = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="3FS") as raised:
        fake.register_fd(elsewhere)
    assert raised.value.errno == errno.EBADF
    ring = reader(fake, mount)
    with pytest.raises(OSError, match="not registered") as raised:
        ring.prepare(iov[:SIZE], True, elsewhere, 0)
    assert raised.value.errno == errno.EBADF
    os.close(elsewhere)


def test_a_descriptor_that_is_closed_first_stays_the_old_file(
    fake: Any, mount: Path, iov: Any, shm: Memory
) -> None:
    old = os.open(mount / "old", os.O_RDWR | os.O_CREAT)
    os.pwrite(old, b"\x77" * SIZE, 0)
    fake.register_fd(old)
    os.close(old)
    new = os.open(mount / "new", os.O_RDWR | os.O_CREAT)
    assert new == old
    ring = reader(fake, mount)
    ring.prepare(iov[:SIZE], True, new, 0)
    assert ring.submit().wait(min_results=1)[0].result == SIZE
    assert (shm.buf[:SIZE] == 0x77).all()
    fake.deregister_fd(old)
    os.close(new)


def test_a_ring_has_one_direction_and_a_file_its_access_mode(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    ring = reader(fake, mount)
    with pytest.raises(OSError, match="prep_io") as raised:
        ring.prepare(iov[:SIZE], False, fd, 0)
    assert raised.value.errno == errno.EINVAL
    only = os.open(mount / "data", os.O_RDONLY)
    fake.register_fd(only)
    writer = fake.make_ioring(str(mount), 8, False)
    with pytest.raises(OSError, match="access") as raised:
        writer.prepare(iov[:SIZE], False, only, 0)
    assert raised.value.errno == errno.EACCES
    fake.deregister_fd(only)
    os.close(only)


def test_entries_are_freed_by_wait_alone(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    ring = reader(fake, mount, entries=2)
    for number in range(2):
        ring.prepare(iov[number * SIZE : (number + 1) * SIZE], True, fd, 0)
    ring.submit()
    until(lambda: len(ring.ior.done) == 2)
    with pytest.raises(OSError, match="full") as raised:
        ring.prepare(iov[:SIZE], True, fd, 0)
    assert raised.value.errno == errno.EAGAIN
    assert len(ring.wait(max_results=2)) == 2
    ring.prepare(iov[:SIZE], True, fd, 0)


def test_what_is_prepared_may_run_before_it_is_submitted(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    ring = reader(fake, mount)
    for number in range(8):
        ring.prepare(iov[number * SIZE : (number + 1) * SIZE], True, fd, 0)
    assert ring.wait(min_results=1, timeout=20.0)


def test_results_come_in_the_order_of_completion_with_their_userdata(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    fake.KNOBS.order = "reverse"
    ring = reader(fake, mount)
    marks = [object() for _ in range(6)]
    for number, mark in enumerate(marks):
        piece = iov[number * SIZE : (number + 1) * SIZE]
        ring.prepare(piece, True, fd, number * SIZE, userdata=mark)
    found = ring.submit().wait(max_results=6, min_results=6, timeout=20.0)
    assert [one.userdata for one in found] == marks[::-1]
    assert [one.base_off for one in found] == [n * SIZE for n in range(6)][::-1]
    assert {one.result for one in found} == {SIZE}


def test_after_a_timeout_operations_stay_in_flight_and_land_later(
    fake: Any, mount: Path, iov: Any, fd: int, shm: Memory
) -> None:
    fake.KNOBS.delay = lambda _: 0.2
    ring = reader(fake, mount)
    ring.prepare(iov[:SIZE], True, fd, 0)
    assert ring.submit().wait(min_results=1, timeout=timedelta(milliseconds=10)) == []
    assert not shm.buf[:SIZE].any()
    assert len(ring.wait(min_results=1, timeout=20.0)) == 1
    assert (shm.buf[:SIZE] == 1).all()


def test_a_depth_above_zero_runs_whole_batches_alone(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    ring = reader(fake, mount, io_depth=3)
    for number in range(2):
        ring.prepare(iov[number * SIZE : (number + 1) * SIZE], True, fd, 0)
    assert ring.submit().wait(min_results=1, timeout=0.05) == []
    ring.prepare(iov[2 * SIZE : 3 * SIZE], True, fd, 0)
    assert len(ring.submit().wait(min_results=3, timeout=20.0)) == 3


def test_a_depth_below_zero_takes_so_many_at_most(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    ring = reader(fake, mount, io_depth=-2)
    for number in range(5):
        ring.prepare(iov[number * SIZE : (number + 1) * SIZE], True, fd, 0)
    assert len(ring.submit().wait(min_results=5, timeout=20.0)) == 5


@pytest.mark.parametrize(
    ("flags", "result"), [(0, 3 * SIZE), (2, -errno.ENODATA)], ids=["zeros", "error"]
)
def test_a_hole_before_data_is_zeros_or_an_error(
    fake: Any, mount: Path, iov: Any, shm: Memory, flags: int, result: int
) -> None:
    file = os.open(mount / "sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, b"\x01" * SIZE, 0)
    os.pwrite(file, b"\x03" * SIZE, 2 * SIZE)
    fake.register_fd(file)
    ring = reader(fake, mount, flags=flags)
    shm.buf[:] = 9
    ring.prepare(iov[: 3 * SIZE], True, file, 0)
    (done,) = ring.submit().wait(min_results=1, timeout=20.0)
    assert done.result == result
    if result > 0:
        assert not shm.buf[SIZE : 2 * SIZE].any()
    fake.deregister_fd(file)
    os.close(file)


@pytest.mark.parametrize("flags", [0, 2])
def test_a_hole_at_the_end_is_short_like_the_end_of_a_file(
    fake: Any, mount: Path, iov: Any, flags: int
) -> None:
    file = os.open(mount / "sparse", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, b"\x01" * SIZE, 0)
    os.ftruncate(file, 2 * SIZE)
    fake.register_fd(file)
    ring = reader(fake, mount, flags=flags)
    for offset in (0, SIZE, 4 * SIZE):
        ring.prepare(iov[: 2 * SIZE], True, file, offset)
    found = ring.submit().wait(max_results=3, min_results=3, timeout=20.0)
    assert sorted(one.result for one in found) == [0, 0, SIZE]
    fake.deregister_fd(file)
    os.close(file)


def test_a_file_that_is_unlinked_is_a_hole_for_its_readers(
    fake: Any, mount: Path, iov: Any, fd: int, shm: Memory
) -> None:
    (mount / "data").unlink()
    ring = reader(fake, mount, flags=2)
    shm.buf[:] = 9
    ring.prepare(iov[:SIZE], True, fd, 0)
    assert ring.submit().wait(min_results=1, timeout=20.0)[0].result == 0
    assert (shm.buf[:SIZE] == 9).all()


def test_the_thread_of_a_ring_ends_with_it_and_flags_leave_a_link(
    fake: Any, mount: Path
) -> None:
    plain, flagged = reader(fake, mount), reader(fake, mount, flags=2)
    threads = [plain.ior.thread, flagged.ior.thread]
    assert all(one.is_alive() for one in threads)
    del plain, flagged
    gc.collect()
    until(lambda: not any(one.is_alive() for one in threads))
    (left,) = (mount / "3fs-virt/iovs").iterdir()
    assert left.suffix == ".f10"


def test_errors_short_results_and_losses_can_be_ordered(
    fake: Any, mount: Path, iov: Any, fd: int
) -> None:
    fate = {0: -errno.EIO, SIZE: 100}
    fake.KNOBS.result = lambda one: fate.get(one.offset)
    fake.KNOBS.lose = lambda one: one.offset == 2 * SIZE
    ring = reader(fake, mount)
    for number in range(3):
        piece = iov[number * SIZE : (number + 1) * SIZE]
        ring.prepare(piece, True, fd, number * SIZE, number)
    found = ring.submit().wait(max_results=3, min_results=3, timeout=0.2)
    assert {one.userdata: one.result for one in found} == {0: -errno.EIO, 1: 100}
    fake.KNOBS.find()
    (late,) = ring.wait(min_results=1, timeout=20.0)
    assert (late.userdata, late.result) == (2, SIZE)


def test_locks_of_one_host_are_not_seen_by_others(fake: Any) -> None:
    """3FS has no locks at all, so the module has none to offer."""
    assert not [name for name in dir(fake) if "lock" in name and name[0] != "_"]


def test_a_client_that_goes_by_position_gets_wrong_bytes(
    fake: Any, mount: Path, iov: Any, fd: int, shm: Memory
) -> None:
    fake.KNOBS.result = lambda one: -errno.EIO if one.offset == 5 * SIZE else None
    ring = reader(fake, mount)
    shm.buf[:] = 9
    for number in range(8):
        piece = iov[number * SIZE : (number + 1) * SIZE]
        ring.prepare(piece, True, fd, number * SIZE)
    found = ring.submit().wait(max_results=8, min_results=8, timeout=20.0)
    believed = [number for number, one in enumerate(found) if one.result == SIZE]
    wrong = [n for n in believed if (shm.buf[n * SIZE : (n + 1) * SIZE] != n + 1).any()]
    assert wrong == [5]


def test_a_client_that_uses_a_ring_after_a_timeout_gets_wrong_bytes(
    fake: Any, mount: Path, iov: Any, fd: int, shm: Memory
) -> None:
    fake.KNOBS.delay = lambda one: 0.1 if one.offset < 4 * SIZE else 0.3
    ring = reader(fake, mount)

    def batch(pages: range) -> bool:
        for place, number in enumerate(pages):
            piece = iov[place * SIZE : (place + 1) * SIZE]
            ring.prepare(piece, True, fd, number * SIZE)
        found = ring.submit().wait(max_results=4, min_results=4, timeout=0.02)
        return len(found) == 4 and all(one.result == SIZE for one in found)

    assert not batch(range(4))
    until(lambda: len(ring.ior.done) == 4)
    assert batch(range(4, 8)), "the late results of the first batch"
    wrong = [p for p in range(4) if (shm.buf[p * SIZE : (p + 1) * SIZE] != p + 5).any()]
    assert wrong == [0, 1, 2, 3]
    ring.wait(max_results=4, min_results=4, timeout=20.0)


def test_a_wait_can_fail(fake: Any, mount: Path) -> None:
    fake.KNOBS.wait_fails = lambda: errno.EIO
    with pytest.raises(OSError, match="wait"):
        reader(fake, mount).wait(min_results=1, timeout=time.monotonic())
