"""Memory with a gate: what is moved, and what is left alone."""

import os
import tempfile
import threading
import time
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
        patch.setattr(io, "_TASK", 2 * self.granule)
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


def test_what_lies_in_memory_is_read_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native.library() is None:
        pytest.skip("Python copies it through a buffer")
    monkeypatch.setattr(BounceBuffer, "read", None)
    engine = PosixIOEngine(2)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        table = Table.of(engine, Path(folder, "d"), [[3000, 5000]] * 8, 1)
        assert not engine.move(table.request).errors.any()
        before = table.memory.copy()
        table.memory[:] = 0
        found = engine.move(
            attrs.evolve(
                table.request,
                write=False,
                gate=MemoryGate(),
                expected=np.array(table.sums(), np.uint64),
            )
        )
        engine.close_file(table.token)
    engine.close()
    assert not found.errors.any()
    assert (table.memory[:-1] == before[:-1]).all()
