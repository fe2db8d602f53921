"""A process that is killed while it copies between tiers, and the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, PoolKind, PoolSpec, Region, Shard
from kvdock.batch import Outcome
from kvdock.pools import Part

pytest.importorskip("kvdock_file")

PAGES = 64
POOL = PoolSpec(
    name="kv",
    kind=PoolKind.MHA,
    parts=[Part(name, "f16", (8, 64), shard_axis=0) for name in ("k", "v")],
    layers=range(4),
    page_tokens=16,
    anchor=True,
)
NAMES = [f"{page:064x}" for page in range(PAGES)]


def opened(root: Path) -> tuple[Attachment, np.ndarray]:
    given = {
        name: {"plugin": "file", "root": str(root / name), "direct": False}
        for name in ("near", "disk", "far")
    }
    dock = Dock.load(only=[*given], settings=given, environ={})
    plan = dock.plan([POOL], Shard(), tiers=[*given], settings=given)
    memory = np.zeros((PAGES, POOL.page_bytes(Shard())), np.uint8)
    regions = {"kv": Region.of(POOL, Shard(), [memory], PAGES)}
    cache = Attachment.open(dock, plan, Namespace(model="m"), regions, given)
    return cache, memory


def content() -> np.ndarray:
    size = POOL.page_bytes(Shard())
    return np.random.default_rng(7).integers(0, 256, (PAGES, size), np.uint8)


def write_and_say(root: Path) -> None:
    """Store pages one by one, while others are copied, until the end."""
    cache, memory = opened(root)
    memory[:] = content()
    for page, name in enumerate(NAMES):
        stored = cache.put([name], {"kv": [page]})
        if stored.pages:
            sys.stdout.write(f"{page}\n")
            sys.stdout.flush()
    sys.stdout.write("all\n")
    sys.stdout.flush()
    sys.stdin.read()


@pytest.mark.parametrize(
    "kill_after",
    [
        pytest.param(1, marks=pytest.mark.slow),
        12,
        pytest.param(40, marks=pytest.mark.slow),
    ],
)
def test_a_killed_copier_leaves_nothing_wrong_and_loses_nothing_whole(
    tmp_path: Path, kill_after: int
) -> None:
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout
        stored = [int(writer.stdout.readline()) for _ in range(kill_after)]
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(60)
    cache, memory = opened(tmp_path)
    expected = content()
    there = cache["kv"].exists(NAMES)
    assert there[stored].all(), "what the near tier acknowledged is there"
    outcomes = cache["kv"].get(NAMES, np.arange(PAGES))
    for page in np.flatnonzero(outcomes == Outcome.OK).tolist():
        assert np.array_equal(memory[page], expected[page]), "wrong bytes"
    assert (outcomes[stored] == Outcome.OK).all()
    # Copies go on from there, and each tier alone has the same bytes.
    memory[:] = expected
    assert cache.put(NAMES, {"kv": np.arange(PAGES)}).pages == PAGES
    assert cache.close()
    for tier in ("disk", "far"):
        for other in {"near", "disk", "far"} - {tier}:
            _hide(tmp_path / other)
        cache, memory = opened(tmp_path)
        assert cache.get(NAMES, {"kv": np.arange(PAGES)}).pages == PAGES
        assert np.array_equal(memory, expected)
        assert cache.close()
        for other in {"near", "disk", "far"} - {tier}:
            _show(tmp_path / other)


def _hide(root: Path) -> None:
    root.rename(root.with_suffix(".away"))


def _show(root: Path) -> None:
    root.rename(root.with_suffix(".promoted"))
    root.with_suffix(".away").rename(root)
    # What was promoted meanwhile is of no use to the next round.
    root.with_suffix(".promoted").rename(root.with_suffix(f".{os.urandom(4).hex()}"))


if __name__ == "__main__":
    write_and_say(Path(sys.argv[1]))
