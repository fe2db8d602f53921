"""Memory with a gate: what is moved, and what is left alone."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock import native
from kvdock.batch import MemoryGate, Operation, Outcome
from kvdock_segments import IORequest, PosixIOEngine, io, posix_io
from kvdock_segments.bounce import BounceBuffer
from kvdock_segments.io import DEADLINE

pytestmark = pytest.mark.usefixtures("each_way")

REUSED = 0x77
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
SLOT = 32768
WRONG = np.uint64(1)


class ClosingGate(MemoryGate):
    """Closes at one of its passages, in or out, and gives the memory away.

    Args:
        step: Which passage.
        memory: What has another use from then on.
    """

    def __init__(self, step: int, memory: Any) -> None:
        super().__init__()
        self._step = step
        self._memory = memory
        self._turn = threading.Lock()
        self._passages = 0

    def enter(self) -> bool:
        self._turn.acquire()
        self._pass()
        entered = super().enter()
        if not entered:
            self._turn.release()
        return entered

    def leave(self) -> None:
        super().leave()
        self._pass()
        self._turn.release()

    def _pass(self) -> None:
        if self._passages == self._step:
            assert self.close(time.monotonic() + 60)
            self._memory[:] = REUSED
        self._passages += 1


@attrs.frozen(eq=False)
class Table:
    """Objects of several pieces in memory, and their slots in a file."""

    token: int
    request: IORequest
    memory: Any
    content: list[bytes]

    @classmethod
    def of(
        cls, engine: PosixIOEngine, path: Path, sizes: list[list[int]], seed: int
    ) -> "Table":
        path.touch()
        here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        token = engine.open_file(path.name, here, create=False)
        os.close(here)
        os.ftruncate(token, len(sizes) * SLOT)
        rng = np.random.default_rng(seed)
        memory = rng.integers(0, 256, sum(map(sum, sizes)) + 1, np.uint8)
        starts = np.cumsum([0, *[n for row in sizes for n in row]])[:-1]
        offsets = rng.permutation(len(sizes)) * SLOT
        request = IORequest(
            write=True,
            files=(token,),
            file_of=np.zeros(len(sizes), np.int64),
            offsets=offsets,
            addresses=starts.reshape(len(sizes), -1) + memory.ctypes.data,
            sizes=np.array(sizes),
        )
        ends = np.cumsum([0, *map(sum, sizes)])
        raw = memory.tobytes()
        content = [
            raw[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        return cls(token, request, memory, content)

    def sums(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(one) for one in self.content]


OBJECTS = st.integers(1, 2).flatmap(
    lambda pieces: st.lists(
        st.lists(st.integers(1, 9000), min_size=pieces, max_size=pieces),
        min_size=1,
        max_size=10,
    )
)


@attrs.frozen
class Trial:
    """Objects, the passage at which their gate closes (-1: none), and an engine."""

    sizes: list[list[int]]
    seed: int
    step: int
    granule: int
    direct: bool
    threads: int
    cached: bool
    damaged: set[int]

    def prepare(self, patch: pytest.MonkeyPatch) -> None:
        """Cut calls as small as the trial says; without a cache, all of them wait."""
        patch.setattr(io, "GRANULE", self.granule)
        patch.setattr(io, "MOST_GRANULE", self.granule)
        patch.setattr(posix_io, "GRANULE", self.granule)
        for module in (io, posix_io):
            patch.setattr(module, "TASK", 2 * self.granule)
        if not self.cached:
            patch.setattr(posix_io, "_CACHED", 0)


TRIALS = st.builds(
    Trial,
    sizes=OBJECTS,
    seed=st.integers(0, 2**32),
    step=st.integers(-1, 12),
    granule=st.sampled_from([4096, 8192, 512 << 10]),
    direct=st.booleans(),
    threads=st.integers(1, 2),
    cached=st.booleans(),
    damaged=st.sets(st.integers(0, 9)),
)


@settings(max_examples=60, deadline=None)
@given(trial=TRIALS)
def test_a_read_leaves_memory_alone_once_its_gate_is_closed(
    tmp_path_factory: pytest.TempPathFactory, trial: Trial
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trial.prepare(patch)
        engine = PosixIOEngine(trial.threads, direct=trial.direct)
        table = Table.of(
            engine, tmp_path_factory.mktemp("t") / "d", trial.sizes, trial.seed
        )
        assert not engine.move(table.request).errors.any()
        expected = np.array(table.sums(), np.uint64)
        wrong = [at for at in trial.damaged if at < len(trial.sizes)]
        expected[wrong] = WRONG
        table.memory[:] = 0
        gate = ClosingGate(trial.step, table.memory)
        found = engine.move(
            attrs.evolve(table.request, write=False, gate=gate, expected=expected)
        )
        engine.close_file(table.token)
        engine.close()
    if gate.closed:
        assert (table.memory == REUSED).all()
        return
    assert not found.errors.any()
    assert found.checksums.tolist() == table.sums()
    start = 0
    for at, content in enumerate(table.content):
        there = table.memory[start : start + len(content)].tobytes()
        start += len(content)
        if at not in wrong:
            assert there == content
        elif len(content) <= trial.granule:
            assert there == bytes(len(content)), "a wrong object was copied"


@pytest.mark.parametrize("nbytes", [8192, 1 << 20])
@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_nothing_wrong_is_copied_beside_an_object_that_ends_early(
    tmp_path: Path, nbytes: int, how: str
) -> None:
    engine = PosixIOEngine(1, direct=how == "direct")
    (tmp_path / "d").write_bytes(b"x" * (2 * nbytes - 4096))
    here = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    token = engine.open_file("d", here, create=False)
    os.close(here)
    memory = np.zeros(2 * nbytes, np.uint8)
    found = engine.move(
        IORequest(
            write=False,
            files=(token,),
            file_of=np.zeros(2, np.int64),
            offsets=np.array([0, nbytes]),
            addresses=memory.ctypes.data + np.array([[0], [nbytes]]),
            sizes=np.full((2, 1), nbytes),
            gate=MemoryGate(),
            expected=np.array([WRONG, WRONG]),
        )
    )
    engine.close_file(token)
    engine.close()
    assert found.nbytes.tolist() == [nbytes, nbytes - 4096]
    assert (found.checksums != WRONG).all()
    assert not memory.any()


@settings(max_examples=60, deadline=None)
@given(trial=TRIALS)
def test_a_write_reports_nothing_that_was_taken_after_its_gate_was_closed(
    tmp_path_factory: pytest.TempPathFactory, trial: Trial
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trial.prepare(patch)
        engine = PosixIOEngine(trial.threads, direct=trial.direct)
        table = Table.of(
            engine, tmp_path_factory.mktemp("t") / "d", trial.sizes, trial.seed
        )
        gate = ClosingGate(trial.step, table.memory)
        done = engine.move(attrs.evolve(table.request, gate=gate))
        target = np.zeros_like(table.memory)
        moved = target.ctypes.data - table.memory.ctypes.data
        back = engine.move(
            attrs.evolve(
                table.request, write=False, addresses=table.request.addresses + moved
            )
        )
        engine.close_file(table.token)
        engine.close()
    reported = done.errors == 0
    assert reported.all() or gate.closed
    wanted = np.array(table.sums(), np.uint64)
    assert (done.checksums[reported] == wanted[reported]).all()
    assert (back.checksums[reported] == wanted[reported]).all()
    assert set(done.errors[~reported].tolist()) <= {DEADLINE}


def test_a_page_of_an_abandoned_put_is_not_published(open_depot: Any) -> None:
    depot = open_depot()
    memory = depot.pages(range(4))
    gate = ClosingGate(1, memory)
    result = depot.store.run(depot.batch(Operation.PUT, range(4), memory, gate=gate))
    assert gate.closed
    assert (memory == REUSED).all()
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * 4
    assert not any(depot.there(range(4)))
    assert depot.put(range(4)).ok.all()
    assert depot.get(range(4)) == [Outcome.OK] * 4


def test_an_abandoned_get_costs_no_page(open_depot: Any) -> None:
    """What it could not deliver is not taken for damage."""
    depot = open_depot()
    depot.put(range(4))
    memory = depot.pages(range(4))
    gate = ClosingGate(0, memory)
    result = depot.store.run(depot.batch(Operation.GET, range(4), memory, gate=gate))
    assert result.outcomes.tolist() == [Outcome.TIMEOUT] * 4
    assert (memory == REUSED).all()
    assert depot.get(range(4)) == [Outcome.OK] * 4


def test_a_thread_that_forks_shares_no_bounce_buffer() -> None:
    engine = PosixIOEngine(1)
    view = engine._bounce.view
    view[0] = 1
    child = os.fork()
    if not child:
        view[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert view[0] == 1


class Shelf:
    """Sixteen objects in a file in memory, which compiled code reads in place."""

    def __init__(
        self, folder: str, short: tuple[int, ...] = (), *, direct: bool = False
    ) -> None:
        if native.library() is None:
            pytest.skip("Python copies it through a buffer")
        self.engine = PosixIOEngine(2, direct=direct)
        path = Path(folder, "d")
        sizes = [[100, 20] if at in short else [3000, 5000] for at in range(16)]
        self.table = Table.of(self.engine, path, sizes, 1)
        assert not self.engine.move(self.table.request).errors.any()
        self.before = self.table.memory[:-1].copy()
        self.table.memory[:] = 9

    def read(self, gate: MemoryGate, expected: Any) -> list[int]:
        asked = attrs.evolve(
            self.table.request, write=False, gate=gate, expected=expected
        )
        found = self.engine.move(asked)
        self.engine.close_file(self.table.token)
        self.engine.close()
        errors: list[int] = found.errors.tolist()
        return errors

    def lengths(self) -> list[int]:
        return [len(one) for one in self.table.content]

    def sums(self) -> Any:
        return np.array(self.table.sums(), np.uint64)


@pytest.fixture
def in_memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield folder


def test_what_lies_in_memory_is_read_in_place_and_zeroed_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, in_memory: str
) -> None:
    shelf = Shelf(in_memory)
    monkeypatch.setattr(BounceBuffer, "read", None)
    expected = shelf.sums()
    expected[5] = WRONG
    assert shelf.read(MemoryGate(), expected) == [0] * 16
    rows = shelf.table.memory[:-1].reshape(16, -1)
    assert not rows[5].any(), "a wrong object was left in memory"
    right = [at for at in range(16) if at != 5]
    assert (rows[right] == shelf.before.reshape(16, -1)[right]).all()


def test_what_compiled_code_leaves_is_compared_with_its_own_sums(
    in_memory: str,
) -> None:
    shelf = Shelf(in_memory, (3, 4, 11))
    expected = shelf.sums()
    expected[11] = WRONG
    assert shelf.read(MemoryGate(), expected) == [0] * 16
    parts = np.split(shelf.table.memory[:-1], np.cumsum(shelf.lengths())[:-1])
    stored = np.split(shelf.before, np.cumsum(shelf.lengths())[:-1])
    same = [(one == other).all() for one, other in zip(parts, stored, strict=True)]
    assert same == [at != 11 for at in range(16)]


@pytest.mark.parametrize("step", [0, 1])
def test_compiled_code_reads_nothing_once_a_gate_is_closed(
    step: int, in_memory: str
) -> None:
    shelf = Shelf(in_memory)
    gate = ClosingGate(step, shelf.table.memory)
    errors = shelf.read(gate, shelf.sums())
    assert gate.closed
    assert (shelf.table.memory == REUSED).all()
    # What was read before it was closed is whole, and was taken away with it.
    assert set(errors) == ({DEADLINE} if step == 0 else {0})


def test_the_page_cache_is_asked_before_a_gate_is_entered(
    monkeypatch: pytest.MonkeyPatch, in_memory: str
) -> None:
    shelf = Shelf(in_memory)
    events: list[str] = []

    class Told(MemoryGate):
        def enter(self) -> bool:
            events.append("entered")
            return super().enter()

    ask = native.Movement.leave_uncached

    def asking(movement: native.Movement, first: int, stop: int) -> None:
        events.append("asked")
        ask(movement, first, stop)

    monkeypatch.setattr(native.Movement, "leave_uncached", asking)
    assert shelf.read(Told(), shelf.sums()) == [0] * 16
    assert events == ["asked", "entered"]


def test_memory_with_a_gate_is_hashed_inside_it_and_not_again(
    monkeypatch: pytest.MonkeyPatch, in_memory: str
) -> None:
    shelf = Shelf(in_memory)
    monkeypatch.setattr(native.Movement, "hash_rows", lambda *_: None)
    done = shelf.engine.move(attrs.evolve(shelf.table.request, gate=MemoryGate()))
    assert not done.errors.any()
    assert not done.checksums.any(), "it was hashed outside of the gate"


@pytest.mark.parametrize("why", ["direct", "no flag", "no sums"])
def test_what_may_wait_inside_a_gate_is_left_to_python(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shelf = Shelf(str(tmp_path), direct=why == "direct")
    monkeypatch.setattr(native, "Movement", None)
    if why == "no flag":
        monkeypatch.setattr(posix_io, "_CACHED", 0)
    expected = None if why == "no sums" else shelf.sums()
    assert shelf.read(MemoryGate(), expected) == [0] * 16
    assert (shelf.table.memory[:-1] == shelf.before).all()
