"""Stored files that are changed at random: pages are lost, and never wrong."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.batch import Outcome
from kvdock.pools import Part
from kvdock.wrappers.key_ring import add_key

TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
"""`make torture` asks for the long form."""
MUTATIONS = 2000 if TORTURE else 150
PAGES = 96
PAGE_BYTES = 4096
BACKENDS: dict[str, tuple[str, Mapping[str, object]]] = {
    "file": ("file", {}),
    "sealed": ("file", {}),
    "nixl": ("nixl", {}),
    "nixl-aio": ("nixl", {"io": "aio", "direct": True}),
    "hf3fs": ("hf3fs", {"mode": "posix", "chunk": 0}),
}
HOW = (
    "bits", "range", "zeros", "cut", "longer", "swapped", "copied", "gone", "renamed",
    "linked", "symlink", "folder", "words",
)  # fmt: skip


@attrs.frozen
class Mutator:
    """Changes files of a store below a folder.

    Args:
        root: The folder.
        rng: Chooses.
        done: How often each kind of change was made.
    """

    root: Path
    rng: np.random.Generator
    done: Counter[str] = attrs.field(factory=Counter)

    def mutate(self) -> bool:
        """Change one file; return whether there was one to change."""
        files = [one for one in self.root.rglob("*") if one.is_file()]
        kind = str(self.rng.choice([".dat", ".idx", ".open", ""]))
        files = sorted(one for one in files if one.name.endswith(kind)) or files
        if not files:
            return False
        path = files[int(self.rng.integers(len(files)))]
        other = files[int(self.rng.integers(len(files)))]
        how = str(self.rng.choice(HOW))
        self._change(how, path, other)
        self.done[how] += 1
        return True

    def _change(self, how: str, path: Path, other: Path) -> None:
        match how:
            case "swapped":
                one, two = path.read_bytes(), other.read_bytes()
                path.write_bytes(two)
                other.write_bytes(one)
            case "copied":
                path.write_bytes(other.read_bytes())
            case "gone":
                path.unlink()
            case "renamed":
                path.rename(path.with_name(f"{other.stem}.{self.rng.integers(99)}.idx"))
            case "linked":
                if path != other:
                    path.unlink()
                    path.hardlink_to(other)
            case "symlink":
                if path != other:
                    path.unlink()
                    path.symlink_to(other)
            case "folder":
                path.unlink()
                path.mkdir()
            case _:
                path.write_bytes(self._changed(how, bytearray(path.read_bytes())))

    def _changed(self, how: str, raw: bytearray) -> bytes:
        at = int(self.rng.integers(len(raw) + 1))
        size = int(self.rng.integers(1, 5000))
        match how:
            case "bits":
                for place in self.rng.integers(0, max(1, len(raw)), 3).tolist():
                    raw[place : place + 1] = bytes(
                        byte ^ 1 << int(self.rng.integers(8))
                        for byte in raw[place : place + 1]
                    )
            case "words":  # of a header or a record
                at -= at % 8
                raw[at : at + 8] = raw[at + 64 : at + 72].ljust(8, b"\xff")
            case "range":
                raw[at : at + size] = self.rng.bytes(min(size, len(raw) - at))
            case "zeros":
                raw[at : at + size] = bytes(min(size, len(raw) - at))
            case "cut":
                del raw[at:]
            case "longer":
                raw += self.rng.bytes(size)
        return bytes(raw)


@attrs.frozen(eq=False)
class Pages:
    """An attachment and memory whose right content is known."""

    cache: Attachment
    memory: np.ndarray
    right: np.ndarray

    def put(self, numbers: np.ndarray) -> int:
        self.memory[numbers] = self.right[numbers]
        names = [f"{number:064x}" for number in numbers.tolist()]
        return int(self.cache.put(names, {"kv": numbers}).pages)

    def check(self) -> int:
        """Load all pages; return how many are there, and fail if one is wrong."""
        self.memory[:] = 0
        numbers = np.arange(PAGES)
        names = [f"{number:064x}" for number in numbers.tolist()]
        there = self.cache["kv"].get(names, numbers) == Outcome.OK
        same = (self.memory == self.right).all(axis=1)
        assert same[there].all(), f"wrong bytes: {np.flatnonzero(there & ~same)}"
        return int(there.sum())


@contextmanager
def opened(backend: str, settings: Mapping[str, object]) -> Iterator[Pages]:
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    right = np.random.default_rng(3).integers(1, 256, (PAGES, PAGE_BYTES), np.uint8)
    raw = np.zeros(PAGES * PAGE_BYTES + 4096, np.uint8)
    first = -raw.ctypes.data % 4096  # for O_DIRECT
    memory = raw[first : first + right.size].reshape(right.shape)
    dock = Dock.load(require=[backend], settings={backend: settings})
    plan = dock.plan([pool], Shard(), prefer=[backend])
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    with Attachment.open(
        dock, plan, Namespace(model="m"), regions, {backend: settings}
    ) as cache:
        yield Pages(cache, memory, right)


def sealing(folder: Path) -> Mapping[str, object]:
    """Make keys beside a store; return the wrapper that uses them."""
    master, keys = bytes(range(32)), folder / "keys.json"
    (folder / "master").write_bytes(master)
    add_key(keys, master, "default")
    return {"name": "seal", "keys": keys, "master_file": folder / "master"}


@pytest.mark.slow
@pytest.mark.parametrize("which", BACKENDS)
def test_no_change_of_stored_files_serves_a_wrong_page_or_stays(
    which: str, tmp_path: Path
) -> None:
    backend, more = BACKENDS[which]
    pytest.importorskip(f"kvdock_{backend}")
    root = tmp_path / "store"
    settings = {
        "root": str(root), "free_space": 0, "segment_bytes": "64 KiB", "quota": "3 MiB",
    }  # fmt: skip
    settings |= more
    mutations = MUTATIONS
    if which == "sealed":
        settings |= {"wrap": [sealing(tmp_path)]}
        mutations *= 5 if TORTURE else 1
    rng = np.random.default_rng(11)
    mutator = Mutator(root, rng)
    lost = made = 0
    while made < mutations:
        with opened(backend, settings) as pages:
            for _ in range(8):
                pages.put(np.arange(PAGES))
                before = pages.check()
                for _ in range(int(rng.integers(1, 4))):
                    made += mutator.mutate()
                lost += before - pages.check()
                pages.put(rng.permutation(PAGES)[:20])
                pages.check()
            made += mutator.mutate()
        for _ in range(int(rng.integers(0, 4))):  # while it is closed
            made += mutator.mutate()
        with opened(backend, settings) as pages:
            pages.check()
            for _ in range(3):
                pages.put(np.arange(PAGES))
            assert pages.check() == PAGES, "changes of files cost pages for good"
        if rng.random() < 0.3:  # files with names of no segment take their room
            shutil.rmtree(root)
    assert lost > mutations // 4
    assert set(mutator.done) == set(HOW)
    print(f"{which}: {made} changes, {lost} pages lost at first, 0 wrong")  # noqa: T201
