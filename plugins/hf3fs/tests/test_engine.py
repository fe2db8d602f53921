"""The engine over rings: what is right, what is late, and what must not happen."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from rig import BLANK, PAGE, Rig, opened
from waiting import until

from kvdock_segments import DEADLINE, UNREGISTERED, IOResult

SLOTS = list(range(48))


@pytest.fixture
def rig(fake: Any, mount: Path) -> Iterator[Rig]:
    with opened(mount) as one:
        yield one
        fake.KNOBS.reset()
        fake.KNOBS.find()


def in_thread(call: Any) -> tuple[threading.Thread, list[IOResult]]:
    """Run a call that may hang; return its thread and what it returned."""
    found: list[IOResult] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


def test_pages_come_back_with_their_checksums(rig: Rig) -> None:
    stored = rig.write(SLOTS)
    assert not stored.errors.any()
    assert (stored.nbytes == PAGE).all()
    loaded = rig.read(SLOTS)
    assert all(rig.right(SLOTS))
    assert (loaded.checksums == stored.checksums).all()


@pytest.mark.parametrize("order", ["random", "fifo", "reverse"])
def test_order_does_not_matter(rig: Rig, fake: Any, order: str) -> None:
    fake.KNOBS.order = order
    rig.write(SLOTS, parts=4)
    assert not rig.read(SLOTS[::-1], parts=2).errors.any()
    assert all(rig.right(SLOTS))


def test_never_more_than_its_entries_are_in_flight(rig: Rig, fake: Any) -> None:
    most = 0

    def watch(_: Any) -> None:
        nonlocal most
        most = max(most, *(one.used for one in fake._states))

    fake.KNOBS.result = watch
    rig.write(SLOTS, parts=4)
    assert 8 <= most <= 16


def test_a_ring_with_fewer_entries_than_asked_for_is_refilled(
    rig: Rig, fake: Any
) -> None:
    rig.write(SLOTS[:1])
    for state in fake._states:
        state.entries = 3
    assert not rig.write(SLOTS).errors.any()
    rig.read(SLOTS)
    assert all(rig.right(SLOTS))


def test_each_object_has_its_own_errno_and_length(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    fate = {7: -errno.ENODATA, 9: 100, 11: -errno.EACCES}
    fake.KNOBS.result = lambda one: fate.get(one.offset // PAGE)
    found = rig.read(SLOTS)
    errors = dict(enumerate(found.errors.tolist()))
    assert errors.pop(7) == errno.ENODATA
    assert errors.pop(11) == errno.EACCES
    assert not any(errors.values())
    assert found.nbytes[9] == 100
    good = [slot for slot in SLOTS if slot not in fate]
    assert all(rig.right(good))
    assert (found.nbytes[good] == PAGE).all()


def test_a_piece_that_fails_fails_its_object_alone(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    at = 5 * PAGE + PAGE // 2
    fake.KNOBS.result = lambda one: -errno.ENODATA if one.offset == at else None
    found = rig.read(SLOTS, parts=2)
    assert np.flatnonzero(found.errors).tolist() == [5]


def test_an_unreachable_server_is_an_error_and_not_a_loss(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    for said, meant in (
        (errno.EIO, errno.EREMOTEIO),
        (7002, errno.EREMOTEIO),
        (errno.EFAULT, errno.EREMOTEIO),
        (errno.ENOENT, errno.ESTALE),
    ):
        fake.KNOBS.result = lambda _, said=said: -said
        assert rig.read([3]).errors.tolist() == [meant]


def test_a_short_write_has_no_room(rig: Rig, fake: Any) -> None:
    fake.KNOBS.result = lambda one: 100 if one.offset == PAGE else None
    assert rig.write([0, 1, 2]).errors.tolist() == [0, errno.ENOSPC, 0]


def test_a_hole_is_never_a_page(rig: Rig) -> None:
    rig.write([0, 2])
    found = rig.read([0, 1, 2])
    assert not found.errors.any()
    assert found.nbytes.tolist() == [PAGE, 0, PAGE]
    # One object over a page, a hole and a page.
    request = rig.request([0], write=False)
    request = attrs.evolve(request, sizes=np.array([[3 * PAGE]]))
    assert rig.engine.move(request).errors.tolist() == [errno.ENODATA]


def test_a_page_of_an_unlinked_file_is_not_zeros(rig: Rig, mount: Path) -> None:
    rig.write(SLOTS)
    (file,) = mount.glob("rig-*")
    file.unlink()
    assert not rig.read(SLOTS).nbytes.any()
    file.touch()


def test_nothing_begins_after_the_deadline(rig: Rig, fake: Any) -> None:
    before = fake.COUNTS.written_bytes
    found = rig.write(SLOTS, within_s=-1.0)
    assert (found.errors == DEADLINE).all()
    assert fake.COUNTS.written_bytes == before


def test_what_was_begun_is_awaited_after_the_deadline(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    fake.KNOBS.delay = lambda _: 0.2
    found = rig.read(SLOTS, within_s=0.05)
    begun = np.flatnonzero(found.errors == 0).tolist()
    assert 1 <= len(begun) <= 16, "one ring full"
    assert all(rig.right(begun))
    late = [slot for slot in SLOTS if slot not in begun]
    assert (found.errors[late] == DEADLINE).all()
    assert (rig.memory[late] == BLANK).all()


def test_a_ring_that_hangs_stays_with_its_call(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    fake.KNOBS.lose = lambda one: one.offset == 3 * PAGE
    thread, found = in_thread(
        lambda: rig.engine.move(
            rig.request(SLOTS[:8], write=False, at=range(48, 56), within_s=0.05)
        )
    )
    until(lambda: any(one.lost for one in fake._states))
    fake.KNOBS.lose = None
    for _ in range(20):
        loaded = rig.engine.move(rig.request(SLOTS[:8], write=False))
        assert not loaded.errors.any()
        assert all(rig.right(SLOTS[:8]))
    assert thread.is_alive()
    assert not found
    rig.memory[51] = BLANK
    fake.KNOBS.find()
    thread.join(20.0)
    assert not found[0].errors.any()
    assert (rig.memory[51] == rig.memory[3]).all(), "the late bytes have their place"
    # It is empty now, and serves again.
    assert len(rig.rings.read._free) == 2


def test_at_most_so_many_rings_are_made_and_the_last_one_is_used_first(
    fake: Any, mount: Path
) -> None:
    with opened(mount, rings=2) as rig:
        rig.write(SLOTS)
        fake.KNOBS.lose = lambda _: True
        calls = [
            in_thread(lambda: rig.engine.move(rig.request([0], write=False)))
            for _ in range(2)
        ]
        until(lambda: sum(len(one.lost) for one in fake._states) == 2)
        fake.KNOBS.lose = None
        assert (rig.read(SLOTS, within_s=0.05).errors == DEADLINE).all()
        fake.KNOBS.find()
        for thread, found in calls:
            thread.join(20.0)
            assert not found[0].errors.any()
        made = fake.COUNTS.rings
        for _ in range(10):
            assert not rig.read(SLOTS).errors.any()
        assert fake.COUNTS.rings == made
        recent = rig.rings.read._free[-1]
        rig.read(SLOTS)
        assert rig.rings.read._free[-1] is recent


def test_a_ring_that_cannot_be_made_fails_the_call(rig: Rig, mount: Path) -> None:
    for link in (mount / "3fs-virt/iovs").iterdir():
        link.rename(mount / link.name)
    (mount / "3fs-virt/iovs").rmdir()
    assert (rig.write(SLOTS).errors == errno.ENOENT).all()
    (mount / "3fs-virt/iovs").mkdir()
    for link in mount.glob("*-*-*-*-*"):
        link.rename(mount / "3fs-virt/iovs" / link.name)
    assert not rig.write(SLOTS).errors.any()


def test_a_wait_that_fails_releases_nothing_in_flight(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    failures = [errno.EIO] * 2
    fake.KNOBS.wait_fails = lambda: failures.pop() if failures else 0
    assert not rig.read(SLOTS[:4]).errors.any()
    assert all(rig.right(SLOTS[:4]))


def test_a_completion_of_something_else_breaks_the_ring(rig: Rig, fake: Any) -> None:
    rig.write(SLOTS)
    rig.read(SLOTS[:1])
    (ring,) = rig.rings.read._free
    (state,) = [one for one in fake._states if one.read]
    twice = rig.engine._iovs[0].kept.inner[:PAGE]
    twice.userdata = ring.free[0]
    state.done.append(twice)
    state.used += 1
    assert not rig.read(SLOTS[:8]).errors.any()
    assert all(rig.right(SLOTS[:8]))
    assert ring.broken
    assert ring not in rig.rings.read._free


def test_memory_outside_of_iovs_is_not_even_summed(rig: Rig) -> None:
    request = rig.request([0, 1, 2], write=True)
    request.addresses[1] = 4096  # not mapped
    found = rig.engine.move(request)
    assert found.errors.tolist() == [0, UNREGISTERED, 0]


def test_pieces_are_cut_where_blocks_of_an_iov_end(fake: Any, mount: Path) -> None:
    sizes = []
    with opened(mount, block=PAGE) as rig:
        rig.write(SLOTS)
        fake.KNOBS.result = lambda one: sizes.append(one.nbytes)
        # Three pages in one piece, which begins within a block.
        request = rig.request([0], write=False)
        request = attrs.evolve(
            request,
            addresses=request.addresses + 4 * PAGE + 100,
            sizes=np.array([[2 * PAGE]]),
        )
        rig.memory[:] = BLANK
        assert not rig.engine.move(request).errors.any()
    assert sorted(sizes) == [100, PAGE - 100, PAGE]


def test_a_file_that_is_not_on_3fs_is_rejected_and_not_left_behind(
    rig: Rig, tmp_path: Path
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="3FS"):
        rig.engine.open_file("elsewhere", folder, create=True)
    os.close(folder)
    assert not (tmp_path / "elsewhere").exists()


def test_descriptors_are_registered_while_they_are_open(rig: Rig, fake: Any) -> None:
    assert rig.token in fake._files
    token = rig.engine.open_file("more", rig.folder, create=True)
    assert token in fake._files
    rig.engine.close_file(token)
    assert token not in fake._files
    os.unlink("more", dir_fd=rig.folder)


def test_a_forked_child_moves_nothing_and_takes_nothing_from_its_parent(
    rig: Rig, mount: Path
) -> None:
    rig.write(SLOTS)
    links = set((mount / "3fs-virt/iovs").iterdir())
    child = os.fork()
    if not child:
        found = rig.engine.move(rig.request([0], write=False))
        rig.engine.close_file(rig.token)
        rig.engine.close()
        rig.loan.give_back()
        os._exit(0 if found.errors.tolist() == [errno.ECHILD] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert set((mount / "3fs-virt/iovs").iterdir()) == links
    assert not rig.read(SLOTS).errors.any()
    assert all(rig.right(SLOTS))
