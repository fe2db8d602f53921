"""Killed writers, full disks, spoiled files, late transfers: never wrong bytes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import (
    Attachment,
    Dock,
    DType,
    Namespace,
    Operation,
    Outcome,
    PoolSpec,
    Region,
    Shard,
)
from kvdock.config import CoreSettings, Deadlines
from kvdock.pools import Part, Per
from kvdock_nixl.agents import Agent
from kvdock_segments import DirectoryStore

WORKER = Path(__file__).with_name("crash_worker.py")
TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
"""`make torture` asks for the long form."""


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("nixl_crash_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


worker = load_worker()


def begun(root: Path, role: str, seed: int, *, direct: bool) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        str(WORKER),
        str(root),
        role,
        str(seed),
        str(int(direct)),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_going(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("direct", [False, True])
def test_no_wrong_page_survives_killed_writers(tmp_path: Path, *, direct: bool) -> None:
    """Two writers are killed again and again while a reader and eviction run."""
    root = tmp_path / "store"
    rng = np.random.default_rng(5)
    kills = 200 if TORTURE else 6
    writers = [begun(root, "write", seed, direct=direct) for seed in (1, 2)]
    reader = begun(root, "read", 3, direct=direct)
    try:
        for process in (*writers, reader):
            wait_going(process)
        for number in range(kills):
            victim = number % 2
            # How long it has been going is left to chance.
            threading.Event().wait(float(rng.random()) * 0.02)
            kill(writers[victim])
            writers[victim] = begun(root, "write", 10 + number, direct=direct)
            wait_going(writers[victim])
            assert reader.poll() is None, "a reader has ended"
    finally:
        for process in (*writers, reader):
            kill(process)
    assert not Path(f"{root}.wrong").exists()
    shelf = worker.Shelf.open(root, direct=direct)
    found = 0
    for start in range(0, worker.KEYS, worker.AT_ONCE):
        numbers = np.arange(start, min(start + worker.AT_ONCE, worker.KEYS))
        there, wrong = shelf.check(numbers)
        assert not wrong
        found += there
    assert found > worker.QUOTA // worker.PAGE_BYTES // 2
    shelf.store.close()
    way = "O_DIRECT" if direct else "buffered"
    print(f"{way}: {kills} writers killed, {found} pages found, 0 wrong")  # noqa: T201


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Any]:
    made = worker.Shelf.open(tmp_path / "store", direct=False)
    yield made
    made.store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "kvdock", str(disk)]
    if (
        os.geteuid()
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_rejects_pages_and_keeps_what_it_has(small_disk: Path) -> None:
    shelf = worker.Shelf.open(small_disk / "store", direct=False)
    stored = np.arange(20)
    # One prefix that was looked up: its tail makes no room by evicting its head.
    shelf.run(Operation.EXISTS, np.arange(620))
    assert shelf.put(stored).all()
    with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096) == 4096:
            pass
    kept: list[int] = []
    for start in range(20, 620, 20):
        numbers = np.arange(start, start + 20)
        kept += numbers[shelf.put(numbers)].tolist()
    assert len(kept) < 600
    for numbers in (stored, np.array(kept[-20:], np.int64)):
        there, wrong = shelf.check(numbers)
        assert (there, wrong) == (len(numbers), [])
    (small_disk / "filler").unlink()
    fresh = np.arange(1000, 1020)
    assert shelf.put(fresh).all()
    assert shelf.check(fresh) == (20, [])
    shelf.store.close()


def spoil(how: str, first: Path, second: Path) -> None:
    """Spoil one segment, or two."""
    match how:
        case "cut":
            os.truncate(first, 8192 + 1000)  # within its second page
        case "swapped":
            held = first.read_bytes(), second.read_bytes()
            for path, data in zip((second, first), held, strict=True):
                with path.open("r+b") as file:
                    file.write(data)
        case "flipped":
            with first.open("r+b") as file:
                pages = np.frombuffer(file.read(), np.uint8).copy()
                pages[::8192] ^= 1
                file.seek(0)
                file.write(pages.tobytes())
        case "gone":
            first.unlink()


@pytest.mark.parametrize("how", ["cut", "swapped", "flipped", "gone"])
def test_spoiled_segments_are_misses_and_other_pages_stay(
    tmp_path: Path, shelf: Any, how: str
) -> None:
    numbers = np.arange(240)
    for start in range(0, 240, 24):
        assert shelf.put(numbers[start : start + 24]).all()
    files = sorted((tmp_path / "store").rglob("*.dat"))
    assert len(files) > 2
    spoil(how, *files[:2])
    fresh = worker.Shelf.open(tmp_path / "store", direct=False)
    for each in (shelf, fresh):
        found = 0
        for start in range(0, 240, 24):
            there, wrong = each.check(numbers[start : start + 24])
            assert not wrong
            found += there
        assert 100 < found < 240
    # What was lost is stored again.
    deadline_s = time.monotonic() + 30
    for start in range(0, 240, 24):
        some, there = numbers[start : start + 24], 0
        # The other handle may drop a record that this one has just believed.
        while there < len(some) and time.monotonic() < deadline_s:
            fresh.put(some)
            there, wrong = fresh.check(some)
            assert not wrong
        assert there == len(some)
    fresh.store.close()


def test_pages_that_are_evicted_under_readers_are_right_or_missing(
    tmp_path: Path,
) -> None:
    shelves = [worker.Shelf.open(tmp_path / "store", direct=False) for _ in range(3)]
    stop = threading.Event()

    def read(shelf: Any) -> int:
        rng, found = np.random.default_rng(1), 0
        while not stop.is_set():
            there, wrong = shelf.check(rng.choice(worker.KEYS, 24, replace=False))
            assert not wrong
            found += there
        return found

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, shelf) for shelf in shelves[1:]]
        try:
            for start in range(0, worker.KEYS, 24):
                shelves[0].request(np.arange(start, start + 24))
        finally:
            stop.set()
        assert all(reader.result(60) for reader in readers)
    assert shelves[0].store.counts["segments_recycled"]
    for shelf in shelves:
        shelf.store.close()


def test_a_namespace_that_is_cleared_under_a_handle_is_stored_again(
    tmp_path: Path, shelf: Any
) -> None:
    numbers = np.arange(24)
    assert shelf.put(numbers).all()
    DirectoryStore(tmp_path / "store").clear(worker.NAMESPACE)
    deadline_s = time.monotonic() + 30
    while shelf.check(numbers)[0] and time.monotonic() < deadline_s:
        pass
    assert shelf.check(numbers) == (0, [])
    assert shelf.put(numbers).all()
    assert shelf.check(numbers) == (24, [])


def test_late_transfers_end_in_leased_memory_and_everything_is_right_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, page_bytes = 200, 8192
    pool = PoolSpec(
        name="kv",
        kind="mla",
        parts=(Part("kv", DType.U8, (page_bytes,), per=Per.PAGE),),
        layers=(0,),
        page_tokens=1,
        anchor=True,
    )
    right = np.random.default_rng(5).integers(0, 256, (pages, page_bytes), np.uint8)
    memory = right.copy()
    dock = Dock.load(require=["nixl"])
    hashes = [f"{page:064x}" for page in range(pages)]
    go_on, wait = threading.Event(), Agent._wait

    def held(self: Agent, handle: Any) -> None:
        assert go_on.wait(120)
        wait(self, handle)

    with Attachment.open(
        dock,
        dock.plan([pool], Shard(), ["nixl"]),
        Namespace(model="late"),
        {"kv": Region.of(pool, Shard(), (memory,), pages)},
        {"nixl": {"root": str(tmp_path / "store"), "free_space": 0}},
        core=CoreSettings(deadlines=Deadlines(get=0.2, put=60.0, exists=60.0)),
    ) as cache:
        everywhere = {"kv": np.arange(pages)}
        assert set(cache.put(hashes, everywhere).outcomes["kv"]) == {Outcome.OK}
        memory[:] = 0
        monkeypatch.setattr(Agent, "_wait", held)
        late = cache.get(hashes, everywhere).outcomes["kv"]
        assert set(late.tolist()) == {Outcome.TIMEOUT}
        # Its memory is not free for other pages before the transfer has ended.
        leases = cache.leases("kv")
        assert leases.in_use(range(pages)).all()
        go_on.set()
        assert leases.wait(range(pages), 60)
        assert cache.wait_idle(60)
        assert (memory == right).all(), "the late bytes are not those of their pages"
        monkeypatch.undo()
        memory[:] = 0
        deadline_s = time.monotonic() + 60
        loaded = 0
        while loaded < pages and time.monotonic() < deadline_s:
            loaded = cache.get(hashes, everywhere).pages  # until the breaker closes
        assert loaded == pages
        assert (memory == right).all()
