"""A second process has the settings of the first, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdock.pools.enums import PoolKind
from kvdock.testing.harness import Harness
from kvdock.testing.loading import load_backend
from kvdock.testing.samples import Sample
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
