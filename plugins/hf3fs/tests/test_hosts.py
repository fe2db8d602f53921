"""Two hosts with caches of their own: one evicts what the other reads, both die."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import host
import pytest
from attached import OK, attached
from stale import ATTRIBUTES_S, LENGTHS_S, StaleAttributes

SCALE = 100.0
ROUNDS = 100 if os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1" else 40
ANSWER_S = 60.0
REAL_TIME_S = float(os.environ.get("TESTS_OF_KVDOCK_HF3FS_REAL_TIME", "0"))


@attrs.define
class Hosts:
    """Two processes that share a root, and are killed and started again."""

    root: Path
    mount: Path
    scale: float
    context: Any = attrs.field(init=False)
    reports: Any = attrs.field(init=False)
    running: dict[int, Any] = attrs.field(factory=dict)
    seen: Counter[str] = attrs.field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["host"])
        # Where the server imports from is not handed to it in any other way.
        path = os.pathsep.join(filter(None, sys.path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            self.context.Process(target=int).start()

    def start(self, slot: int, seed: int) -> None:
        # A queue of its own: a writer that is killed may hold its lock.
        reports = self.context.SimpleQueue()
        process = self.context.Process(
            target=host.live,
            args=(str(self.root), str(self.mount), seed, self.scale, reports),
            daemon=True,
        )
        process.start()
        self.running[slot] = process, reports

    def kill(self, slot: int) -> None:
        process, reports = self.running.pop(slot)
        process.kill()
        process.join(ANSWER_S)
        reports.close()

    def hear(self, slot: int) -> None:
        """Wait for one round of a host, and add up what it did."""
        process, reports = self.running[slot]
        until = time.monotonic() + ANSWER_S
        while reports.empty():
            assert time.monotonic() < until, f"host {slot} says nothing"
            assert process.is_alive(), f"host {slot} ended"
            time.sleep(0.005)
        _, found = reports.get()
        assert isinstance(found, dict), found
        self.seen.update(found)


def run(hosts: Hosts, rounds: int, seconds: float = 0.0) -> None:
    """Kill one of the hosts in turn, and start another one in its place."""
    begun_s = time.monotonic()
    try:
        for slot in range(2):
            hosts.start(slot, slot)
        for number in range(rounds):
            until_s = begun_s + seconds * (number + 1) / rounds
            while True:
                for slot in range(2):
                    hosts.hear(slot)
                if time.monotonic() >= until_s:
                    break
            hosts.kill(number % 2)
            hosts.start(number % 2, number + 2)
    finally:
        for slot in list(hosts.running):
            hosts.kill(slot)


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_two_hosts_that_evict_and_die_again_and_again_serve_no_wrong_page(
    root: Path, mount: Path
) -> None:
    hosts = Hosts(root, mount, SCALE)
    run(hosts, ROUNDS)
    assert hosts.seen["hit"] > ROUNDS, hosts.seen
    assert hosts.seen["put"] > ROUNDS * host.RUN // 4, hosts.seen
    with attached({"root": str(root), **host.SETTINGS}) as engine:
        assert OK in engine.get(range(64))


@pytest.mark.slow
@pytest.mark.skipif(not REAL_TIME_S, reason="make trial-hf3fs-hosts")
def test_two_hosts_in_real_time(root: Path, mount: Path) -> None:
    hosts = Hosts(root, mount, 1.0)
    rounds = max(2, int(REAL_TIME_S / 20))
    run(hosts, rounds, REAL_TIME_S)
    print(  # noqa: T201 - the trial shows it
        f"\n{rounds} kills in {REAL_TIME_S:.0f} s: {dict(hosts.seen)}"
    )
    assert hosts.seen["hit"] > rounds


def test_attributes_are_as_old_as_the_caches_of_3fs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 s for attributes, 5 s more for lengths that grow by writes."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    host = StaleAttributes(1.0)
    host.install(monkeypatch.setattr)
    file = tmp_path / "file"
    file.write_bytes(b"1")

    def length() -> int:
        return os.stat(file).st_size  # noqa: PTH116 - what is replaced

    assert length() == 1
    with file.open("ab") as more:
        more.write(b"23")
    clock[0] = ATTRIBUTES_S - 1
    assert length() == 1
    clock[0] = ATTRIBUTES_S + 1
    assert length() == 1, "its writer has not reported it"
    clock[0] = 2 * ATTRIBUTES_S + LENGTHS_S
    assert length() == 3
    fd = os.open(file, os.O_RDWR)
    assert os.pread(fd, 3, 0) == b"123"
    with file.open("r+b") as other:
        other.write(b"9")
    assert os.pread(fd, 3, 0) == b"123"
    clock[0] *= 2
    assert os.pread(fd, 3, 0) == b"923"
    os.close(fd)


def test_a_store_looks_up_nothing_by_a_fresh_length(
    fake: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches that never expire, what this host stores itself is found."""
    del fake
    StaleAttributes(1e-9).install(monkeypatch.setattr)
    with attached({"root": str(root), "free_space": 0}) as engine:
        assert engine.put(range(40)) == [OK] * 40
        assert engine.get(range(40)) == [OK] * 40


def test_a_reader_misses_until_its_caches_expire(
    fake: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del fake
    settings = {"root": str(root), "free_space": 0}
    caches = StaleAttributes(30.0)
    with attached(settings) as writer, monkeypatch.context() as patch:
        caches.install(patch.setattr)
        with attached(settings) as reader:
            assert OK not in reader.get(range(20))
            patch.undo()
            writer.put(range(20))
            caches.install(patch.setattr)
            found = reader.get(range(20))
            until = time.monotonic() + ANSWER_S
            while found != [OK] * 20:
                assert time.monotonic() < until
                time.sleep(0.05)
                found = reader.get(range(20))
