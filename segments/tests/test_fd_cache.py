"""Descriptors: their number is bounded, and a store survives when they run out."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments import catalog, directory

OpenDepot = Callable[..., Any]
SMALL = {"segment_bytes": 1 << 16}


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Limit the descriptors of this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_files_that_stay_open_leave_room_for_the_engine(
    open_depot: OpenDepot, limit: Callable[[int], None]
) -> None:
    limit(320)
    depot = open_depot(**SMALL)
    for start in range(0, 400, 10):
        assert depot.put(range(start, start + 10)).ok.all()
        assert depot.get(range(start, start + 10)) == [0] * 10
    assert len(list(depot.root.rglob("*.dat"))) > 40
    assert depot.store.usage().open_files == 320 // 16


def test_idle_files_are_closed_when_descriptors_run_out(
    open_depot: OpenDepot, limit: Callable[[int], None]
) -> None:
    writer = open_depot(**SMALL)
    writer.put(range(400))
    writer.store.close()
    depot = open_depot(**SMALL)
    # Free numbers below the limit count as well: fill them.
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    limit(max(taken) + 12)
    try:
        for start in range(0, 400, 5):
            assert depot.get(range(start, start + 5)) == [0] * 5
            assert depot.put([1000 + start]).ok.all()
        assert depot.store.usage().open_files < 12
    finally:
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_a_store_that_cannot_be_read_is_an_outcome(
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    # Without a pause between two refreshes.
    monkeypatch.setattr(catalog, "_LONGEST_S", 0.0)
    depot, other = open_depot(), open_depot()
    depot.put(range(20))
    other.put(range(20, 40))

    def refuse(*_: object) -> object:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(directory, "listing", refuse)
        assert depot.get(range(40)) == [Outcome.ERROR] * 40
        assert set(depot.put(range(40, 45)).outcomes) == {Outcome.ERROR}
        look = Batch(Operation.EXISTS, depot.keys(range(40)))
        assert set(depot.store.run(look).outcomes) == {Outcome.ERROR}
    assert f"store {depot.root} cannot be used" in caplog.text
    assert depot.get(range(40)) == [0] * 40
    assert depot.put(range(40, 45)).ok.all()
