"""Defects that SGLang's own hf3fs backend has, by name, and what happens here.

Four have no test, because what they are about is not here:

- B8, a skipped backup answers with one bool for a list: every batch is answered with
  an array of one outcome per key, whose length the core checks.
- B9, handlers of SIGTERM and SIGINT are replaced, so that a process does not end: the
  plugin installs none; the daemon sees the end of a process by itself.
- B10, each release searches a list of all pages: a slot is freed in the arrays of its
  segment, and eviction plans in numpy.
- B11, all keys are dumped as JSON under a lock: each record is written to its index
  file once, when its page is stored.
"""

from __future__ import annotations

import errno
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attached as one_pool
import numpy as np
import pytest
from attached import OK, Engine, attached
from rig import PAGE, Rig, opened

from kvdock import Outcome
from kvdock_segments import UNREGISTERED, ownership

SMALL = {"free_space": 0, "quota": "4 MiB", "segment_bytes": "256 KiB"}


@pytest.fixture
def settings(fake: Any, root: Path) -> dict[str, Any]:
    del fake
    return {"root": str(root), **SMALL}


@pytest.fixture
def engine(settings: dict[str, Any]) -> Iterator[Engine]:
    with attached(settings) as one:
        yield one


@pytest.fixture
def rig(fake: Any, mount: Path) -> Iterator[Rig]:
    del fake
    with opened(mount) as one:
        yield one


def test_b1_a_missing_key_shifts_no_page(engine: Engine) -> None:
    engine.put([0, 1, 3])
    assert engine.get([0, 1, 2, 3]) == [OK, OK, Outcome.ABSENT, OK]


def test_b2_a_key_that_two_writers_store_costs_no_space_for_ever(
    settings: dict[str, Any], engine: Engine
) -> None:
    numbers = range(32)
    with attached(settings) as other:
        for each in (engine, other):
            each.put(numbers)
        for first in range(100, 1000, 32):
            assert other.put(range(first, first + 32)) == [OK] * 32
            assert other.get(range(first, first + 32)) == [OK] * 32


def test_b3_a_batch_larger_than_the_store_is_cut_and_raises_nothing(
    settings: dict[str, Any],
) -> None:
    with attached(settings, pages=512) as engine:
        outcomes = engine.put(range(512))
        assert set(outcomes) == {OK, Outcome.REFUSED}
        assert outcomes.count(OK) > 150
        found = engine.get(range(512))
    assert found.count(OK) == outcomes.count(OK)
    assert found[:8] == [OK] * 8, "the head of the prefix stays"


def test_b4_a_crash_while_storing_costs_no_space_for_ever(
    settings: dict[str, Any], mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import host
    import threefs

    context = multiprocessing.get_context("forkserver")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(threefs.__file__).parent))
        reports = context.SimpleQueue()
        arguments = (settings["root"], str(mount), 0, 1.0, reports)
        process = context.Process(target=host.live, args=arguments, daemon=True)
        process.start()
    until = time.monotonic() + 60.0
    while reports.empty():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.join()
    reports.close()
    monkeypatch.setattr(ownership, "SILENCE_S", 0.0)
    monkeypatch.setattr(ownership, "ABANDONED_S", 0.0)
    with attached(settings, pages=256) as engine:
        engine.put([0])
        stored = engine.put(range(1000, 1200))
    assert stored.count(OK) > 150


def test_b5_a_page_that_is_evicted_while_it_is_read_is_right_or_a_miss(
    fake: Any, settings: dict[str, Any], engine: Engine
) -> None:
    engine.put(range(32))
    fake.KNOBS.delay = lambda one: 0.05 if one.read else 0
    found: list[list[int]] = []
    read = threading.Thread(target=lambda: found.append(engine.get(range(32))))
    read.start()
    with attached(settings) as other:
        for first in range(100, 1000, 50):
            other.put(range(first, first + 50))
    read.join()
    # `get` has compared the bytes of every page that is OK.
    assert found
    assert OK not in engine.get(range(32))


def test_b6_an_old_index_that_comes_back_serves_no_page_of_another_key(
    settings: dict[str, Any], root: Path
) -> None:
    with attached(settings) as engine:
        engine.put(range(32))
    kept = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    old = {path: data for path, data in kept.items() if path.suffix != ".dat"}
    with attached(settings) as engine:
        for first in range(100, 1000, 50):
            engine.put(range(first, first + 50))
    for path, data in old.items():
        path.write_bytes(data)
    with attached(settings) as engine:
        # All are compared; of the old keys the bytes are gone.
        assert OK not in engine.get(range(32))
        for first in range(100, 1000, 50):
            engine.get(range(first, first + 50))


def test_b7_pages_of_another_size_are_other_pages(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(settings) as engine:
        engine.put(range(8))
    monkeypatch.setattr(one_pool, "PAGE_BYTES", one_pool.PAGE_BYTES // 2)
    with attached(settings) as engine:
        assert engine.get(range(8)) == [Outcome.ABSENT] * 8


def test_u1_a_failing_page_is_that_page_and_no_other(fake: Any, engine: Engine) -> None:
    engine.put(range(16))
    seventh: list[int] = []

    def fail(one: Any) -> int | None:
        seventh.append(one.offset)
        return -errno.ECONNREFUSED if one.offset == 7 * 16384 else None

    fake.KNOBS.result = fail
    found = engine.get(range(16))
    assert seventh
    assert found == [OK] * 7 + [Outcome.ERROR] + [OK] * 8


def test_u2_late_results_are_not_those_of_the_next_call(rig: Rig, fake: Any) -> None:
    rig.write(range(8))
    fake.KNOBS.delay = lambda one: 0.3 if one.offset < 4 * PAGE else 0
    late = threading.Thread(
        target=rig.engine.move,
        args=(rig.request(range(4), write=False, at=range(40, 44), within_s=0.01),),
    )
    late.start()
    for _ in range(20):
        loaded = rig.engine.move(rig.request(range(4, 8), write=False, at=range(4)))
        assert not loaded.errors.any()
        for place in range(4):
            assert (rig.memory[place] == rig.memory[place + 4]).all()
    late.join()


def test_u4_a_missing_key_or_a_failure_closes_nothing(
    fake: Any, engine: Engine
) -> None:
    engine.put(range(8))
    for _ in range(3):
        assert engine.get([0, 99]) == [OK, Outcome.ABSENT]
        fake.KNOBS.result = lambda _: -errno.ECONNREFUSED
        assert OK not in engine.get(range(2))
        fake.KNOBS.reset()
        assert engine.get(range(8)) == [OK] * 8


def test_u5_one_address_out_of_range_is_found_among_many(rig: Rig) -> None:
    rig.write(range(8))
    request = rig.request(range(8), write=False)
    request.addresses[5] = rig.memory.ctypes.data + rig.memory.nbytes - 1
    rig.memory[:] = 9
    found = rig.engine.move(request)
    assert np.flatnonzero(found.errors).tolist() == [5]
    assert found.errors[5] == UNREGISTERED
    assert rig.memory[-1, -1] == 9
