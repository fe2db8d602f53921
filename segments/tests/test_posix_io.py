"""The POSIX I/O engine: any memory, any object, any failure."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.batch import MemoryGate
from kvdock_segments import IORequest, IOResult, PosixIOEngine, checksums
from kvdock_segments.io import DEADLINE, plan_request

pytestmark = pytest.mark.usefixtures("each_way")


@pytest.fixture(params=["buffered", "direct"])
def engine(request: pytest.FixtureRequest) -> Iterator[PosixIOEngine]:
    made = PosixIOEngine(2, direct=request.param == "direct")
    yield made
    made.close()


def transfer(
    token: int, offsets: list[int], addresses: object, sizes: object, **more: Any
) -> IORequest:
    return IORequest(
        write=False,
        files=(token,),
        file_of=np.zeros(len(offsets), np.int64),
        offsets=np.array(offsets, np.int64),
        addresses=np.asarray(addresses, np.int64),
        sizes=np.asarray(sizes, np.int64),
        **more,
    )


def opened(engine: PosixIOEngine, folder: Path, nbytes: int) -> int:
    folder.mkdir(exist_ok=True)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        token = engine.open_file("data", here, create=True)
    finally:
        os.close(here)
    os.ftruncate(token, nbytes)
    return token


def whole_blocks_only(call: Callable[..., Any]) -> Callable[..., Any]:
    """Reject what a disk rejects in direct I/O, also where there is none."""

    def checked(file: int, what: Any, offset: int, *more: int) -> Any:
        parts = what if isinstance(what, list) else [what]
        if offset % 4096 or sum(map(len, parts)) % 4096 or len(parts) > 1024:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(file, what, offset, *more)

    return checked


@pytest.mark.parametrize("piece", [301, 512, 3001])
@pytest.mark.parametrize("gate", [None, MemoryGate()], ids=["plain", "gated"])
def test_an_object_may_have_any_number_of_pieces(
    engine: PosixIOEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    gate: MemoryGate | None,
) -> None:
    if engine.slot_bytes(1) == 4096:
        for name in ("pwrite", "preadv", "pwritev"):
            monkeypatch.setattr(os, name, whole_blocks_only(getattr(os, name)))
    pieces = 2500
    nbytes = engine.slot_bytes(pieces * piece)
    token = opened(engine, tmp_path / "t", 2 * nbytes)
    rng = np.random.default_rng(piece)
    memory = rng.integers(0, 256, (2, pieces, 2 * piece), np.uint8)
    starts = memory.ctypes.data + np.arange(2 * pieces) * 2 * piece
    asked = transfer(
        token, [0, nbytes], starts.reshape(2, pieces), np.full((2, pieces), piece)
    )
    written = engine.move(attrs.evolve(asked, write=True))
    assert not written.errors.any()
    right = memory[..., :piece].copy()
    memory[..., :piece] = 0
    read = engine.move(attrs.evolve(asked, gate=gate, expected=written.checksums))
    engine.close_file(token)
    assert not read.errors.any()
    assert (memory[..., :piece] == right).all()


def stored(engine: PosixIOEngine, objects: IORequest) -> IOResult:
    return engine.move(attrs.evolve(objects, write=True))


def moved_all(moved: IOResult, nbytes: list[int]) -> bool:
    return not moved.errors.any() and moved.nbytes.tolist() == nbytes


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.integers(0, 9000), min_size=3, max_size=3), min_size=1, max_size=12
    ),
    seed=st.integers(0, 2**32),
    direct=st.booleans(),
)
def test_scattered_objects_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    seed: int,
    direct: bool,  # noqa: FBT001 - drawn
) -> None:
    engine = PosixIOEngine(2, direct=direct)
    token = opened(engine, tmp_path_factory.mktemp("t"), len(sizes) * 28672)
    source = np.random.default_rng(1).integers(0, 256, 400_000, np.uint8)
    target = np.zeros_like(source)
    starts = np.cumsum([0, *[n for row in sizes for n in row]])[:-1].reshape(-1, 3)
    slots = np.random.default_rng(seed).permutation(len(sizes))
    offsets = (slots * 28672).tolist()
    totals = [sum(row) for row in sizes]
    at = starts + source.ctypes.data
    written = stored(engine, transfer(token, offsets, at, sizes))
    loaded = engine.move(transfer(token, offsets, starts + target.ctypes.data, sizes))
    engine.close_file(token)
    engine.close()
    used = sum(totals)
    assert moved_all(written, totals)
    assert moved_all(loaded, totals)
    assert (target[:used] == source[:used]).all()
    assert not target[used:].any()
    ends = np.cumsum([0, *totals])
    sums = [xxhash.xxh3_64_intdigest(source[a:b].tobytes()) for a, b in pairwise(ends)]
    assert written.checksums.tolist() == loaded.checksums.tolist() == sums
    after = checksums(starts + target.ctypes.data, np.array(sizes))
    assert after.tolist() == sums


def test_objects_of_several_files_find_their_own(
    engine: PosixIOEngine, tmp_path: Path
) -> None:
    """Short ones among them, which compiled code leaves."""
    tokens = [opened(engine, tmp_path / name, 16 * 4096) for name in "abc"]
    source = np.random.default_rng(1).integers(0, 256, (16, 4096), np.uint8)
    target = np.zeros_like(source)
    short = np.arange(16) % 5 == 2
    request = attrs.evolve(
        transfer(0, [4096 * (at // 3) for at in range(16)], np.zeros((16, 1)), [[0]]),
        files=tuple(tokens),
        file_of=np.arange(16) % 3,
        addresses=source.ctypes.data + 4096 * np.arange(16)[:, None],
        sizes=np.where(short, 100, 4096)[:, None],
    )
    nbytes = np.where(short, 100, 4096).tolist()
    assert moved_all(stored(engine, request), nbytes)
    moved = target.ctypes.data - source.ctypes.data
    back = engine.move(attrs.evolve(request, addresses=request.addresses + moved))
    assert moved_all(back, nbytes)
    assert (target[~short] == source[~short]).all()
    assert (target[short, :100] == source[short, :100]).all()
    assert not target[short, 100:].any()
    for token in tokens:
        engine.close_file(token)


def test_large_objects_are_moved_whole(engine: PosixIOEngine, tmp_path: Path) -> None:
    nbytes = 5 << 20
    token = opened(engine, tmp_path, 2 * nbytes)
    with mmap.mmap(-1, 4 * nbytes) as memory:
        memory[: 2 * nbytes] = os.urandom(2 * nbytes)
        holder = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(holder)
        sizes = [[nbytes], [nbytes]]
        stored(engine, transfer(token, [nbytes, 0], [[base], [base + nbytes]], sizes))
        into = [[base + 2 * nbytes], [base + 3 * nbytes]]
        loaded = engine.move(transfer(token, [nbytes, 0], into, sizes))
        assert moved_all(loaded, [nbytes, nbytes])
        assert memory[: 2 * nbytes] == memory[2 * nbytes :]
        del holder
    engine.close_file(token)


@pytest.mark.parametrize(
    ("object_bytes", "together"),
    [(64 << 10, 8), (96 << 10, 5), (1 << 20, 2), (3 << 19, 2), (3 << 20, 1)],
)
def test_a_call_takes_whole_objects_and_at_most_two_large_ones(
    object_bytes: int, together: int
) -> None:
    target = np.zeros(1, np.uint8)
    offsets = [at * object_bytes for at in range(16)]
    sizes = np.broadcast_to(np.array([[object_bytes]]), (16, 1))
    at = np.array(offsets)[:, None] + target.ctypes.data
    plan, tasks = plan_request(transfer(0, offsets, at, sizes), IOResult.of(16))
    assert plan.runs == [*range(0, 16, together), 16]
    assert together * object_bytes <= plan.granule
    assert (tasks[0][0], tasks[-1][1]) == (0, len(plan.runs) - 1)


def test_the_end_of_a_file_is_short_and_not_an_error(
    engine: PosixIOEngine, tmp_path: Path
) -> None:
    token = opened(engine, tmp_path, 3 * 4096)
    target = np.zeros((4, 4096), np.uint8)
    at = target.ctypes.data + np.arange(4).reshape(-1, 1) * 4096
    loaded = engine.move(transfer(token, [0, 4096, 8192, 12288], at, [[4096]] * 4))
    assert loaded.nbytes.tolist() == [4096, 4096, 4096, 0]
    assert not loaded.errors.any()
    engine.close_file(token)


def test_one_bad_address_fails_alone(engine: PosixIOEngine, tmp_path: Path) -> None:
    token = opened(engine, tmp_path, 3 * 4096)
    with mmap.mmap(-1, 3 * 4096) as memory:
        holder = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(holder)
        nowhere = 4096
        into = [[base], [nowhere], [base + 8192]]
        loaded = engine.move(transfer(token, [0, 4096, 8192], into, [[4096]] * 3))
        assert loaded.errors.tolist() == [0, errno.EFAULT, 0]
        assert loaded.nbytes.tolist() == [4096, 0, 4096]
        del holder
    engine.close_file(token)


def test_a_closed_file_is_an_errno_for_each_object(
    engine: PosixIOEngine, tmp_path: Path
) -> None:
    token = opened(engine, tmp_path, 4096)
    engine.close_file(token)
    target = np.zeros((2, 4096), np.uint8)
    at = target.ctypes.data + np.arange(2).reshape(-1, 1) * 4096
    loaded = engine.move(transfer(token, [0, 4096], at, [[4096]] * 2))
    assert loaded.errors.tolist() == [errno.EBADF] * 2


def test_a_deadline_in_the_past_begins_nothing(
    engine: PosixIOEngine, tmp_path: Path
) -> None:
    token = opened(engine, tmp_path, 8 * 4096)
    target = np.ones((8, 4096), np.uint8)
    at = target.ctypes.data + np.arange(8).reshape(-1, 1) * 4096
    call = transfer(
        token, [n * 4096 for n in range(8)], at, [[4096]] * 8, deadline_s=0.0
    )
    loaded = engine.move(call)
    assert loaded.errors.tolist() == [DEADLINE] * 8
    assert target.all()
    engine.close_file(token)


def test_a_small_read_does_not_wait_for_a_long_write(tmp_path: Path) -> None:
    engine = PosixIOEngine(2)
    nbytes = 64 << 20
    token = opened(engine, tmp_path, nbytes + 4096)
    source = np.ones((64, 1 << 20), np.uint8)
    at = source.ctypes.data + np.arange(64).reshape(-1, 1) * (1 << 20)
    offsets = [n << 20 for n in range(64)]
    sizes = np.full((64, 1), 1 << 20)
    target = np.zeros((1, 4096), np.uint8)
    done = threading.Event()
    spent_s: list[float] = []

    def write() -> None:
        for _ in range(4):
            begun_s = time.monotonic()
            stored(engine, transfer(token, offsets, at, sizes))
            spent_s.append(time.monotonic() - begun_s)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    waited_s = []
    while not done.is_set():
        begun_s = time.monotonic()
        engine.move(transfer(token, [nbytes], [[target.ctypes.data]], [[4096]]))
        waited_s.append(time.monotonic() - begun_s)
    thread.join()
    engine.close_file(token)
    engine.close()
    # Queued behind the writes it would wait for half of one on average.
    assert sorted(waited_s)[len(waited_s) // 2] < min(spent_s) / 4


def test_a_helper_that_begins_late_touches_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = PosixIOEngine(2)
    nbytes = 4 << 20
    token = opened(engine, tmp_path, nbytes)
    memory = np.ones(nbytes, np.uint8)
    at = [[memory.ctypes.data]]
    parts = transfer(
        token,
        [n << 20 for n in range(4)],
        [[at[0][0] + (n << 20)] for n in range(4)],
        [[1 << 20]] * 4,
    )
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", out_of_threads)
        assert moved_all(engine.move(parts), [1 << 20] * 4)
    assert not memory.any()
    memory[:] = 7  # the caller uses it again
    other = np.ones(nbytes, np.uint8)
    again = [[other.ctypes.data + (n << 20)] for n in range(4)]
    engine.move(transfer(token, [n << 20 for n in range(4)], again, [[1 << 20]] * 4))
    engine.close()  # leftover tasks have run by now
    os.close(token)
    assert (memory == 7).all()


HUNG = """
import os, sys, threading, time
import numpy as np
from kvdock_segments import IORequest, PosixIOEngine

engine = PosixIOEngine(2)
here = os.open(sys.argv[1], os.O_RDONLY)
token = engine.open_file("data", here, create=True)
os.ftruncate(token, 4 << 20)
os.preadv = lambda *_: time.sleep(90)
memory = np.zeros(4 << 20, np.uint8)
each = np.arange(4) << 20
sizes = np.full((4, 1), 1 << 20)
at = (memory.ctypes.data + each).reshape(-1, 1)
call = IORequest(
    write=False,
    files=(token,),
    file_of=np.zeros(4, np.int64),
    offsets=each,
    addresses=at,
    sizes=sizes,
)
threading.Thread(target=engine.move, args=(call,), daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_read_that_never_ends_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HUNG, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=30).returncode == 0


def test_concurrent_calls_share_the_helpers_and_close_ends_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name.startswith("kvdock-io"):
            time.sleep(0.1)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    before = set(threading.enumerate())
    engine = PosixIOEngine(2)
    token = opened(engine, tmp_path, 64 << 20)
    room = np.zeros((64, 1 << 20), np.uint8)
    offsets = [at << 20 for at in range(64)]
    addresses = room.ctypes.data + np.array(offsets)[:, None]
    asked = transfer(token, offsets, addresses, np.full((64, 1), 1 << 20))
    callers = [threading.Thread(target=engine.move, args=(asked,)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    engine.close_file(token)
    engine.close()
    assert not set(threading.enumerate()) - before
