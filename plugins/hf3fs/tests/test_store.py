"""The store over rings: which bytes move how, into which slots and files."""

from __future__ import annotations

import fcntl
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from attached import OK, PAGE_BYTES, attached, planned
from rig import ring_threads
from waiting import until

from kvdock.testing.open_files import open_files
from kvdock_hf3fs.chunks import slot_bytes
from kvdock_hf3fs.shared_memory import IOVS

NUMBERS = list(range(32))
MOVERS = ("read", "pread", "preadv", "write", "pwrite", "pwritev", "sendfile")


def given(root: Path, **more: object) -> dict[str, Any]:
    return {"root": str(root), "free_space": 0, **more}


class PosixBytes:
    """Counts what moves by system calls from and to files of pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        for name in MOVERS:
            monkeypatch.setattr(os, name, self.counting(name, getattr(os, name)))

    def counting(self, name: str, call: Any) -> Any:
        def counted(fd: int, *rest: Any) -> Any:
            kind = Path(f"/proc/self/fd/{fd}").readlink().suffix
            self.counts[f"{name} {kind}"] += 1
            return call(fd, *rest)

        return counted


def test_no_byte_of_a_page_moves_by_posix(
    fake: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = PosixBytes(monkeypatch)
    before = fake.COUNTS.written_bytes, fake.COUNTS.read_bytes
    with attached(given(root)) as engine:
        assert engine.put(NUMBERS) == [OK] * len(NUMBERS)
        assert engine.get(NUMBERS[::-1]) == [OK] * len(NUMBERS)
    moved = len(NUMBERS) * PAGE_BYTES
    assert fake.COUNTS.written_bytes - before[0] == moved
    assert fake.COUNTS.read_bytes - before[1] == moved
    assert any("pwrite .idx" in one or "pwrite .open" in one for one in counts.counts)
    assert not [one for one in counts.counts if one.endswith(".dat")]


@pytest.mark.usefixtures("fake")
def test_memory_from_elsewhere_is_staged_and_the_route_says_so(root: Path) -> None:
    _, plan = planned(given(root), lent=False)
    assert plan.anchor.mode == "staged"
    assert "not in memory of hf3fs's allocator" in plan.anchor.reason
    with attached(given(root), lent=False) as engine:
        assert engine.put(NUMBERS) == [OK] * len(NUMBERS)
        assert engine.get(NUMBERS) == [OK] * len(NUMBERS)
    _, plan = planned(given(root), lent=True)
    assert plan.anchor.mode == "zero copy"


def test_in_mode_posix_any_memory_will_do(tmp_path: Path) -> None:
    settings = given(tmp_path / "store", mode="posix")
    _, plan = planned(settings, lent=False)
    assert plan.anchor.mode == "zero copy"
    with attached(settings, lent=False) as engine:
        assert engine.put(NUMBERS) == [OK] * len(NUMBERS)
        assert engine.get(NUMBERS) == [OK] * len(NUMBERS)


@pytest.mark.parametrize("mode", ["usrbio", "posix"])
@pytest.mark.usefixtures("fake")
def test_no_lock_is_ever_taken_on_a_segment(
    root: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """3FS has none: what a host locks, the others do not see."""
    locked = []
    real = fcntl.fcntl

    def watch(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_OFD_SETLK:
            locked.append(struct.unpack_from("h", rest[0])[0])
        return real(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", watch)
    settings = given(root, mode=mode, quota="4 MiB", segment_bytes=1 << 18)
    with attached(settings) as one:
        for start in range(0, 256, 32):
            one.put(range(start, start + 32))
        one.attachment.clear()
    assert set(locked) <= {fcntl.F_UNLCK}


@pytest.mark.parametrize(
    ("nbytes", "slot"),
    [(1, 512), (513, 1024), (65536, 65536), (65537, 131072), (1 << 20, 1 << 20)],
)
def test_a_slot_divides_a_chunk(nbytes: int, slot: int) -> None:
    assert slot_bytes(nbytes, 1 << 20) == slot


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 20, 3 << 20, 5 * 4096])
@pytest.mark.parametrize("least", [512, 4096])
def test_slots_and_chunks_divide_each_other_and_stay_what_they_are(
    chunk: int, least: int
) -> None:
    for nbytes in (1, 511, 4097, 70000, chunk - 1, chunk, chunk + 1, 7 * chunk):
        slot = slot_bytes(nbytes, chunk, least)
        assert slot >= nbytes
        assert not slot % least
        assert not (slot % chunk if slot > chunk else chunk % slot)
        assert slot_bytes(slot, chunk, least) == slot


@pytest.mark.parametrize("mode", ["usrbio", "posix"])
@pytest.mark.usefixtures("fake")
def test_files_have_their_length_and_no_space_before_they_are_written(
    root: Path, mode: str
) -> None:
    with attached(given(root, mode=mode)) as engine:
        engine.put(NUMBERS[:1])
    (data,) = root.glob("*/*/*.dat")
    status = data.stat()
    assert status.st_size == 16 << 20
    assert status.st_blocks * 512 < 1 << 20


@pytest.mark.usefixtures("fake")
def test_two_pools_of_an_attachment_share_its_rings(root: Path) -> None:
    with attached(given(root)) as one, attached(given(root)) as two:
        for engine in (one, two):
            assert engine.store._engine._rings.read is not None
        assert one.store._engine._rings is not two.store._engine._rings


@pytest.mark.usefixtures("fake")
def test_descriptors_threads_and_memory_end_with_an_attachment(root: Path) -> None:
    def cycle() -> None:
        with attached(given(root, open_files=2)) as engine:
            engine.put(NUMBERS)
            assert engine.get(NUMBERS) == [OK] * len(NUMBERS)

    cycle()
    until(lambda: not ring_threads())
    before = open_files()
    for _ in range(5):
        cycle()
    until(lambda: not ring_threads())
    assert not open_files() - before
    assert not len(IOVS)


@pytest.mark.usefixtures("fake")
def test_the_setting_limits_files_that_stay_open(root: Path) -> None:
    settings = given(root, open_files=2, segment_bytes=1 << 17, quota="8 MiB")
    with attached(settings) as engine:
        for start in range(0, 256, 32):
            engine.put(range(start, start + 32))
        assert len(list(root.glob("*/*/*.dat"))) > 4
        assert engine.store.usage().open_files <= 2
