"""A recorded stream of a load's events: indexes of it equal what the store has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm_environment
from router_index import finish, replay

LOAD = Path(__file__).with_name("router_load.py")
TOKENS = 16


def start(folder: Path, pages: int, first: int, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(LOAD), str(folder), str(pages), str(first), *more]
    environ = {**os.environ, **vllm_environment.CPU}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environ)


def left(folder: Path) -> set[int]:
    """Return the event hashes of what the store still has of the last load."""
    names: list[str] = json.loads((folder / "left").read_text())
    return {int(name[-16:], 16) for name in names}


@pytest.mark.parametrize(
    "pages",
    [1200, pytest.param(20_000, marks=pytest.mark.slow)],  # an hour at 5.5 a second
)
def test_indexes_equal_the_store_after_evictions(tmp_path: Path, pages: int) -> None:
    finish(start(tmp_path, pages, 0), tmp_path, 60 + pages / 20)
    dynamo, llmd = replay(tmp_path, TOKENS)
    stored = left(tmp_path)
    assert 0 < len(stored) < pages / 2, "the store has evicted"
    assert dynamo.tiers["disk"] == stored
    # What was evicted first may be the page that llm-d finds the next one by.
    assert llmd.holds("storage") == stored


def test_indexes_equal_the_store_after_a_kill_and_a_restart(tmp_path: Path) -> None:
    killed = start(tmp_path, 40_000, 0, "killed")
    events, end_s = tmp_path / "events", time.monotonic() + 300
    while not events.exists() or events.stat().st_size < 200_000:
        assert killed.poll() is None, (tmp_path / "log").read_text()[-4000:]
        assert time.monotonic() < end_s
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    dynamo, _ = replay(tmp_path, TOKENS)
    assert dynamo.tiers["disk"]
    # A router forgets a worker that is gone; its successor begins with nothing.
    events.unlink()
    finish(start(tmp_path, 800, 1 << 20), tmp_path, 300)
    dynamo, llmd = replay(tmp_path, TOKENS)
    assert dynamo.tiers["disk"] == llmd.holds("storage") == left(tmp_path)
    assert dynamo.tiers["disk"]
