"""A second process has the settings of the first, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest

from kvdock.pools.enums import PoolKind
from kvdock.testing.harness import Harness
from kvdock.testing.loading import load_backend
from kvdock.testing.samples import Sample
from kvdock.testing.watchdog import DidNotReturn, Watchdog
from kvdock.testing.workers import Worker

PATIENCE_S = 20.0

CODE = """
import sys
from kvdock.pools.enums import PoolKind
from kvdock.testing.loading import load_backend
from kvdock.testing.harness import Harness
from kvdock.testing.samples import Sample, page_hashes
from kvdock.testing.workers import Worker

plugin = "reference:folder"
harness = Harness(plugin, {"root": sys.argv[1]}, load_backend(plugin))
worker = Worker.start(harness)
worker.attach(Sample(kind=PoolKind.MHA))
worker.ask("write_for_ever", hashes=page_hashes(4))
print(worker.process.pid, flush=True)
sys.stdin.read()
"""


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_a_writer_ends_when_the_process_that_started_it_is_killed(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as owner:
        assert owner.stdout
        writer = int(owner.stdout.readline())
        assert running(writer)
        owner.kill()
    deadline = time.monotonic() + PATIENCE_S
    try:
        while running(writer) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running(writer), "it still writes after its caller has ended"
    finally:
        if running(writer):
            os.kill(writer, signal.SIGKILL)


def test_a_setting_of_none_is_no_folder_of_that_name_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = "reference:folder"
    worker = Worker.start(Harness(plugin, {"root": None}, load_backend(plugin)))
    try:
        with pytest.raises(AssertionError, match="'root' is missing"):
            worker.attach(Sample(kind=PoolKind.MHA))
    finally:
        worker.end()
    assert not list(tmp_path.iterdir())


LONG_S = 30.0


def test_a_call_that_never_returns_is_found_and_the_next_one_runs() -> None:
    watchdog = Watchdog()
    gate = threading.Event()
    with pytest.raises(DidNotReturn, match=r"a wait has not returned after 0\.1 s"):
        watchdog.run(gate.wait, 0.1, "a wait")
    assert watchdog.run(lambda: 7, LONG_S, "seven") == 7
    gate.set()
    watchdog.close()


def test_nothing_of_a_call_is_kept_after_it() -> None:
    class Thing:
        pass

    watchdog = Watchdog()
    for _ in range(100):
        thing = Thing()
        watched = weakref.ref(thing)
        watchdog.run(partial(id, thing), LONG_S, "a call")
        del thing
        assert watched() is None
    watchdog.close()


def test_a_forked_child_has_workers_of_its_own() -> None:
    watchdog = Watchdog()
    watchdog.run(lambda: 7, LONG_S, "seven")
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if watchdog.run(lambda: 8, LONG_S, "eight") == 8 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    watchdog.close()


def test_calls_that_follow_each_other_share_a_thread() -> None:
    watchdog = Watchdog()
    first = watchdog.run(threading.current_thread, LONG_S, "a call")
    assert watchdog.run(threading.current_thread, LONG_S, "a call") is first
    assert first is not threading.current_thread()
    watchdog.close()
    assert not first.is_alive()
