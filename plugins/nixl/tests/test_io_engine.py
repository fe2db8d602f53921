"""The I/O engine on NIXL: any memory, any object, any failure."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from kvdock import KvdockError
from kvdock.geometry import block_of
from kvdock_nixl import call
from kvdock_nixl.agent_pair import AGENTS, SharedAgents
from kvdock_nixl.agents import Agent
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.io_engine import NixlIOEngine
from kvdock_nixl.settings import IOMethod
from kvdock_segments import DEADLINE, UNREGISTERED, IORequest, IOResult, checksums

SLOT = 32768
MEMORY_BYTES = 24 << 20


@attrs.define(eq=False)
class Bench:
    """An engine, its registered memory and one open file."""

    engine: NixlIOEngine
    memory: npt.NDArray[np.uint8]
    folder: int
    tokens: list[int] = attrs.field(factory=list)

    @property
    def start(self) -> int:
        return int(self.memory.ctypes.data)

    def file(self, nbytes: int, name: str = "data") -> int:
        token = self.engine.open_file(name, self.folder, create=True)
        self.engine.preallocate(token, nbytes)
        self.tokens.append(token)
        return token

    def move(
        self,
        write: bool,  # noqa: FBT001 - a direction, first as in a sentence
        token: int,
        offsets: Any,
        starts: Any,
        sizes: Any,
        **more: Any,
    ) -> IOResult:
        offsets = np.asarray(offsets, np.int64)
        return self.engine.move(
            IORequest(
                write=write,
                files=(token,),
                file_of=np.zeros(len(offsets), np.int64),
                offsets=offsets,
                addresses=np.asarray(starts, np.int64) + self.start,
                sizes=np.asarray(sizes, np.int64),
                **more,
            )
        )


@pytest.fixture(params=["io_uring", "io_uring direct", "aio direct"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    io, _, direct = request.param.partition(" ")
    memory = np.frombuffer(mmap.mmap(-1, MEMORY_BYTES), np.uint8)
    engine = NixlIOEngine.open(IOMethod(io), [block_of(memory)], direct=bool(direct))
    made = Bench(engine, memory, os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    yield made
    for token in made.tokens:
        engine.close_file(token)
    engine.close()
    os.close(made.folder)


@pytest.fixture
def buffered(bench: Bench) -> Bench:
    if bench.engine._direct:
        pytest.skip("the same with direct I/O")
    return bench


def past_nixl() -> int:
    moved = MOVED.read()
    return moved[Way.KERNEL_READ] + moved[Way.KERNEL_WRITE]


@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("pieces", [1, 3])
def test_scattered_objects_come_back_as_they_were_through_nixl_alone(
    bench: Bench, pieces: int, odd: int
) -> None:
    rng = np.random.default_rng(pieces + odd)
    count = 200
    sizes = (
        np.full((count, pieces), 8192)
        if not odd
        else rng.integers(0, 10000, (count, pieces))
    )
    sizes[0, 0] = 8192
    starts = (np.cumsum(sizes) - sizes.ravel()).reshape(count, pieces) + odd
    used = int(sizes.sum()) + odd
    half = MEMORY_BYTES // 2
    bench.memory[:used] = rng.integers(0, 256, used, np.uint8)
    offsets = rng.permutation(count) * SLOT
    token = bench.file(count * SLOT)
    before = past_nixl()
    written = bench.move(True, token, offsets, starts, sizes)
    loaded = bench.move(False, token, offsets, starts + half, sizes)
    assert past_nixl() == before
    for result in (written, loaded):
        assert not result.errors.any()
        assert (result.nbytes == sizes.sum(axis=1)).all()
        assert (result.checksums == checksums(starts + bench.start, sizes)).all()
    assert (bench.memory[half + odd : half + used] == bench.memory[odd:used]).all()
    assert not bench.memory[half + used : half + used + 4096].any()


def test_objects_of_more_pieces_than_a_transfer_takes_come_back(bench: Bench) -> None:
    pieces = 3000
    bench.memory[: pieces * 512] = np.arange(pieces * 512) % 251
    starts = np.arange(pieces)[::-1].reshape(1, -1) * 512
    sizes = np.full((1, pieces), 512)
    token = bench.file(2 << 20)
    assert not bench.move(True, token, [0], starts, sizes).errors.any()
    half = MEMORY_BYTES // 2
    assert not bench.move(False, token, [0], starts + half, sizes).errors.any()
    assert (
        bench.memory[half : half + pieces * 512] == bench.memory[: pieces * 512]
    ).all()


def test_more_objects_than_an_agent_holds_move_in_turns(buffered: Bench) -> None:
    """An agent that is given too many at once is broken for good."""
    count = 9000
    buffered.memory[: count * 512] = np.arange(count * 512) % 253
    at = np.arange(count).reshape(-1, 1) * 512
    sizes = np.full((count, 1), 512)
    token = buffered.file(count * 512)
    half = MEMORY_BYTES // 2

    def both(_: int) -> bool:
        written = buffered.move(True, token, at[:, 0], at, sizes)
        loaded = buffered.move(False, token, at[:, 0], at + half, sizes)
        return not written.errors.any() and not loaded.errors.any()

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(both, range(24)))
    loaded = buffered.memory[half : half + count * 512]
    assert (loaded == buffered.memory[: count * 512]).all()


def test_one_bad_object_does_not_fail_the_others(bench: Bench) -> None:
    count, bad = 40, 17
    token = bench.file(count * SLOT - 4096)
    starts = np.arange(count).reshape(-1, 1) * SLOT
    sizes = np.full((count, 1), SLOT)
    # It begins within the file, and ends 4096 bytes beyond.
    offsets = [*range(bad), count - 1, *range(bad, count - 1)]
    bench.memory[: count * SLOT] = 7
    half = MEMORY_BYTES // 2
    assert not bench.move(
        True, token, np.arange(39) * SLOT, starts[:39], sizes[:39]
    ).errors.any()
    before = MOVED.read()
    result = bench.move(False, token, np.array(offsets) * SLOT, starts + half, sizes)
    after = MOVED.read()
    assert not result.errors.any()
    assert result.nbytes.tolist() == [SLOT - 4096 * (n == bad) for n in range(count)]
    assert after[Way.NIXL_READ] - before[Way.NIXL_READ] == (count - 1) * SLOT
    assert after[Way.KERNEL_READ] - before[Way.KERNEL_READ] == SLOT - 4096


def test_memory_that_is_not_registered_is_neither_read_nor_written(
    bench: Bench,
) -> None:
    elsewhere = np.full(SLOT, 9, np.uint8)
    token = bench.file(4 * SLOT)
    starts = [[0], [int(elsewhere.ctypes.data) - bench.start], [MEMORY_BYTES - 4096]]
    for write in (True, False):
        result = bench.move(write, token, [0, SLOT, 2 * SLOT], starts, [[SLOT]] * 3)
        assert result.errors.tolist() == [0, UNREGISTERED, UNREGISTERED]
        assert result.nbytes.tolist() == [SLOT, 0, 0]
    assert (elsewhere == 9).all()


@pytest.mark.parametrize("odd", [0, 3])
def test_nothing_begins_after_the_deadline(bench: Bench, odd: int) -> None:
    token = bench.file(4 * SLOT)
    bench.memory[:SLOT] = 5
    late = time.monotonic()
    result = bench.move(True, token, [0], [[odd]], [[8192]], deadline_s=late)
    assert result.errors.tolist() == [DEADLINE]
    again = bench.move(False, token, [0], [[SLOT]], [[8192]])
    assert not again.errors.any()
    assert not bench.memory[SLOT : SLOT + 8192].any()


def test_a_deadline_in_between_leaves_whole_transfers_and_nothing_else(
    buffered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 10
    token = buffered.file(count << 20)
    starts = np.arange(count).reshape(-1, 1) << 20
    sizes = np.full((count, 1), 1 << 20)
    finish = Agent.finish

    def slow(self: Agent, handle: Any) -> None:
        finish(self, handle)
        while time.monotonic() < until_s:
            threading.Event().wait(0.01)

    monkeypatch.setattr(Agent, "finish", slow)
    monkeypatch.setattr(call, "CACHED_PART_BYTES", 4 << 20)
    until_s = time.monotonic() + 1.0
    result = buffered.move(True, token, starts[:, 0], starts, sizes, deadline_s=until_s)
    assert set(result.errors.tolist()) == {0, DEADLINE}
    assert ((result.nbytes == 1 << 20) == (result.errors == 0)).all()


def test_a_slot_that_buffered_writes_laid_out_is_read_past_the_page_cache(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "old").write_bytes(bytes(512 * 3) + b"page" * 640)
    token = bench.engine.open_file("old", bench.folder, create=False)
    bench.tokens.append(token)
    result = bench.move(False, token, [512 * 3], [[0]], [[2560]])
    assert (result.errors.tolist(), result.nbytes.tolist()) == ([0], [2560])
    assert bytes(bench.memory[:2560]) == b"page" * 640
    if bench.engine._direct:
        # Whole blocks would replace the end of the slot before.
        result = bench.move(True, token, [512 * 3], [[4096]], [[2560]])
        assert result.errors.tolist() == [errno.EINVAL]


def test_a_write_to_a_file_that_is_read_only_fails_with_its_errno(
    buffered: Bench,
) -> None:
    token = buffered.file(4 * SLOT)
    other = os.open("data", os.O_RDONLY, dir_fd=buffered.folder)
    os.dup2(other, token)
    os.close(other)
    result = buffered.move(True, token, [0, SLOT], [[0], [SLOT]], [[SLOT]] * 2)
    assert result.errors.tolist() == [errno.EBADF] * 2


def test_memory_and_files_are_registered_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[int, int | None]] = []
    register = Agent.register

    def counted(self: Agent, at: int, nbytes: int, *, fd: int | None = None) -> Any:
        known.append((nbytes, fd))
        return register(self, at, nbytes, fd=fd)

    monkeypatch.setattr(Agent, "register", counted)
    token = bench.file(8 * SLOT)
    for _ in range(3):
        for write in (True, False):
            bench.move(write, token, [0], [[1]], [[8192]])
    files = [fd for _, fd in known if fd is not None]
    assert files == [token] * 2  # by the reader and the writer
    # Bounce buffers stay registered.
    assert len(known) - len(files) <= 2


def test_a_file_is_forgotten_before_its_descriptor_is_another_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    forget, close = Agent.forget, os.close

    def forgotten(self: Agent, registered: object) -> None:
        seen.append("forget")
        forget(self, registered)

    def closed(fd: int) -> None:
        seen.append("close")
        close(fd)

    monkeypatch.setattr(Agent, "forget", forgotten)
    monkeypatch.setattr(os, "close", closed)
    bench.engine.close_file(bench.engine.open_file("x", bench.folder, create=True))
    assert seen[-3:] == ["forget", "forget", "close"]


def test_a_transfer_under_way_is_not_released_when_a_signal_raises(
    buffered: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL frees a handle whose I/O runs; a later transfer is then reported wrongly."""
    agent = AGENTS._shared[IOMethod.IO_URING].pair.agent(write=False)
    order: list[str] = []

    class Raw:
        """Stays under way for some polls, and a signal comes in the second."""

        def check_xfer_state(self, handle: object) -> str:
            del handle
            order.append("PROC" if len(order) < 5 else "DONE")
            if len(order) == 2:
                raise KeyboardInterrupt
            return order[-1]

    class Handle:
        def release(self) -> None:
            order.append("released")

    monkeypatch.setattr(agent, "_raw", Raw())
    agent._free.acquire()
    with pytest.raises(KeyboardInterrupt):
        agent.finish(Handle())
    assert order[-2:] == ["DONE", "released"]
    monkeypatch.undo()
    assert not buffered.move(
        True, buffered.file(SLOT), [0], [[0]], [[SLOT]]
    ).errors.any()


def test_an_engine_that_is_closed_under_a_call_ends_when_that_call_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.frombuffer(mmap.mmap(-1, SLOT), np.uint8)
    engine = NixlIOEngine.open(IOMethod.IO_URING, [block_of(memory)], direct=False)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    token = engine.open_file("data", folder, create=True)
    engine.preallocate(token, SLOT)
    entered, go_on, wait = threading.Event(), threading.Event(), Agent._wait

    def held(self: Agent, handle: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        wait(self, handle)

    monkeypatch.setattr(Agent, "_wait", held)
    at = int(memory.ctypes.data)
    request = IORequest(
        write=True,
        files=(token,),
        file_of=np.zeros(1, np.int64),
        offsets=np.zeros(1, np.int64),
        addresses=np.array([[at]]),
        sizes=np.array([[SLOT]]),
    )
    with ThreadPoolExecutor(1) as thread:
        call: Callable[[], IOResult] = thread.submit(engine.move, request).result
        assert entered.wait(60)
        engine.close()
        assert AGENTS._shared, "the agents are gone under a transfer"
        go_on.set()
        assert not call().errors.any()
    assert not AGENTS._shared
    os.close(token)
    os.close(folder)


def test_a_forked_child_gets_an_error_at_once_and_cannot_attach(bench: Bench) -> None:
    token = bench.file(4 * SLOT)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        result = bench.move(False, token, [0], [[0]], [[SLOT]])
        said = [*result.errors.tolist()]
        try:
            AGENTS.acquire(IOMethod.IO_URING)
        except KvdockError as error:
            said.append("do not survive a fork" in str(error) or str(error))
        os.write(write_end, repr(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(read_end, 4096).decode()
    os.close(read_end)
    os.close(write_end)
    assert answer == repr([errno.ECHILD, True])
    assert not bench.move(True, token, [0], [[0]], [[SLOT]]).errors.any()


def test_all_pools_of_a_process_share_two_agents() -> None:
    shared = SharedAgents()
    one, two = (shared.acquire(IOMethod.IO_URING) for _ in range(2))
    assert one is two
    assert one.agent(write=True) is not one.agent(write=False)
    shared.release(IOMethod.IO_URING)
    assert shared.acquire(IOMethod.IO_URING) is one
    shared.release(IOMethod.IO_URING)
    shared.release(IOMethod.IO_URING)
    assert not shared._shared
