"""The commands on a disk that is full: what they report, and that nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, Region, Shard
from kvdock.pools import mha

if TYPE_CHECKING:
    from tiny import Shelf

pytestmark = pytest.mark.slow

PAGES = 16
POOL = mha("kv", heads=2, head_dim=64, layers=range(2), page_tokens=16, anchor=True)
HASHES = [f"{page:064x}" for page in range(PAGES)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 72 MiB: a little more than a backend asks for."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=72m,mode=700", "kvdock", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    return filler


def moved(root: Path, operation: str) -> int:
    """Store or restore all pages; return how many, each with the right bytes."""
    memory = np.zeros((PAGES, POOL.page_bytes(Shard())), np.uint8)
    numbers = np.arange(PAGES, dtype=np.uint8)[:, None]
    if operation == "put":
        memory[:] = numbers
    dock = Dock.load(require=["file"])
    with Attachment.open(
        dock,
        dock.plan([POOL], Shard(), prefer=["file"]),
        Namespace(model="org/model"),
        {"kv": Region.of(POOL, Shard(), [memory], pages=PAGES)},
        {"file": {"root": root, "free_space": 0, "segment_bytes": "1 MiB"}},
    ) as cache:
        found = int(getattr(cache, operation)(HASHES, {"kv": np.arange(PAGES)}).pages)
    assert np.array_equal(
        memory[:found], np.repeat(numbers, memory.shape[1], 1)[:found]
    )
    return found


def test_what_measures_or_stores_reports_a_full_disk_and_leaves_nothing(
    shelf: Shelf, disk: Path
) -> None:
    filler = fill(disk)
    root = ("--set", f"root={disk / 'kv'}", "--set", "free_space=0")
    for command in (
        ("bench", "file", *root),
        ("doctor", "file", *root),
        ("demo", "--backend", "file", "--dir", str(disk), "--set", "free_space=0"),
    ):
        done = shelf.kvdock(*command)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 1, said
        assert "0 B to use: 0 B are free" in said
        assert "Free some space, or choose another root." in said
        assert "Traceback" not in said
        assert list(disk.iterdir()) == [filler]


def test_a_store_on_a_full_disk_is_listed_verified_and_cleared(
    shelf: Shelf, disk: Path
) -> None:
    root = disk / "kv"
    assert moved(root, "put") == PAGES
    filler = fill(disk)
    for command in (
        ("ls", root),
        ("stat", root),
        ("verify", root),
        ("verify", root, "--heal"),
        ("gc", root),
    ):
        done = shelf.kvdock("store", *map(str, command))
        assert (done.returncode, done.stderr) == (0, ""), command
    assert moved(root, "get") == PAGES
    (name,) = (one.name for one in root.iterdir() if len(one.name) == 64)
    done = shelf.kvdock(
        "store", "rm", str(root), "--namespace", name[:12], "--yes", "--json"
    )
    (freed,) = (one["freed_bytes"] for one in json.loads(done.stdout)["removals"])
    assert (done.returncode, freed > PAGES * POOL.page_bytes(Shard())) == (0, True)
    assert moved(root, "get") == 0
    filler.unlink()
    assert moved(root, "put") == PAGES
