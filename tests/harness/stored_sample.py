"""A small store of the file backend, kept as test data, and what it holds.

Its archive lies beside the tests of the file backend. It was written when version 2 of
the index files was introduced, with

    python tests/harness/stored_sample.py plugins/file/tests/data

It is never written again: it stands for the stores of users. If reading it fails, then
the layout on disk, the keys or the namespace record have changed.

What was done to it: two tensor-parallel ranks stored three generations of pages in
four pools under a quota that holds about half of them. They read the pages of
`KEPT` between the generations, so that later ones took the place of pages that
were not read. `stored_sample_2.json` says which pages were left.
Some records have a time to expire, a tenant and a key id, and one slot has failed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Attachment, Dock, Layout, Namespace, Region, Shard
from kvdock.pools import Per, mamba, mha, mla
from kvdock_segments.format import failed_records, with_checksums
from kvdock_segments.index_file import read_contents, write_records
from kvdock_segments.paths import IndexName

if TYPE_CHECKING:
    from kvdock import PoolSpec
    from kvdock.pools import Part

SAMPLE = "stored_sample_2"
"""Name of the archive (.tar.xz) and of what it holds (.json)."""

_FIRST = Layout.LAYER_FIRST
POOLS = (
    mla(
        "kv",
        layers=(0, 1),
        page_tokens=4,
        latent=40,
        rope=8,
        anchor=True,
        layout=_FIRST,
    ),
    mha(
        "draft",
        layers=(0,),
        page_tokens=4,
        heads=2,
        head_dim=12,
        draft=True,
        required=False,
        layout=_FIRST,
    ),
    mha(
        "cross",
        layers=(0, 1),
        page_tokens=4,
        heads=4,
        head_dim=7,
        head_group=1,
        layout=_FIRST,
    ),
    mamba(
        "mamba",
        layers=(1,),
        page_tokens=4,
        conv=[(6, 5)],
        temporal=(4, 6, 2),
        layout=_FIRST,
    ),
)
NAMESPACE = Namespace(model="sample/model", revision="7", salt="a tenant")
DIGEST = "52e535b2e13378fac66313c8e6aa36a8bdacc2fdf3e367f112f6aab57be4b508"
"""Name of the namespace's folder: the SHA-256 of its record."""
RANKS = (Shard(tp_rank=0, tp_size=2), Shard(tp_rank=1, tp_size=2))
GENERATION = 64
"""Pages of one generation."""
GENERATIONS = 3
KEPT = range(8)
"""Pages of the first generation that were read again after each one."""


def hashes(numbers: range) -> list[str]:
    """Return the page hashes of these pages."""
    return [hashlib.sha256(f"page {number}".encode()).hexdigest() for number in numbers]


def row(pool: str, part: str, page: int, where: tuple[int, int, int]) -> bytes:
    """Return the 8 bytes that one row of a page begins with.

    Args:
        pool: The pool.
        part: The part.
        page: The page's number.
        where: Global layer, token and head (or channel) of the row.
    """
    text = f"{pool}/{part}/{page}/{where}"
    return hashlib.sha256(text.encode()).digest()[:8]


@attrs.frozen(eq=False)
class Memory:
    """Host memory of one pool on one rank: layer-first, one array for each part."""

    pool: PoolSpec
    shard: Shard
    parts: tuple[npt.NDArray[np.uint8], ...]

    @classmethod
    def of(cls, pool: PoolSpec, shard: Shard, pages: int) -> Memory:
        """Make memory for so many pages."""
        tokens = {Per.TOKEN: pool.page_tokens, Per.PAGE: 1}
        return cls(
            pool,
            shard,
            tuple(
                np.zeros(
                    (
                        len(pool.layers),
                        pages,
                        tokens[part.per],
                        pool.local_units(part, shard),
                        part.row_bytes,
                    ),
                    np.uint8,
                )
                for part in pool.parts
            ),
        )

    def region(self) -> Region:
        """Describe it to the core."""
        return Region.of(self.pool, self.shard, self.parts, self.parts[0].shape[1])

    def rows(self, part: Part, page: int) -> npt.NDArray[np.uint8]:
        """Return what a part of a page holds, (layers, tokens, units, row bytes)."""
        layers, _, tokens, units, row_bytes = self.parts[
            self.pool.parts.index(part)
        ].shape
        first = self.shard.tp_rank * units if part.shard_axis is not None else 0
        raw = b"".join(
            row(self.pool.name, part.name, page, (layer, token, first + unit)).ljust(
                row_bytes, b"."
            )[:row_bytes]
            for layer in self.pool.layers
            for token in range(tokens)
            for unit in range(units)
        )
        return np.frombuffer(raw, np.uint8).reshape(layers, tokens, units, row_bytes)

    def fill(self, at: int, page: int) -> None:
        """Place the bytes of a page."""
        for part, memory in zip(self.pool.parts, self.parts, strict=True):
            memory[:, at] = self.rows(part, page)

    def holds(self, at: int, page: int) -> bool:
        """Return whether exactly the bytes of a page are there."""
        return all(
            np.array_equal(memory[:, at], self.rows(part, page))
            for part, memory in zip(self.pool.parts, self.parts, strict=True)
        )


@attrs.frozen(eq=False)
class Rank:
    """One rank that is attached to a store."""

    attachment: Attachment
    memory: Mapping[str, Memory]

    @classmethod
    def open(cls, root: Path, shard: Shard) -> Rank:
        """Attach every pool, with memory for one generation."""
        dock = Dock.load(require=["file"])
        settings: Mapping[str, Mapping[str, object]] = {
            "file": {
                "root": root,
                "free_space": 0,
                "quota": "768 KiB",
                "segment_bytes": "64 KiB",
            }
        }
        plan = dock.plan(POOLS, shard, ["file"], settings=settings)
        pools = {route.pool.name: route.pool for route in plan.routes}
        memory = {
            name: Memory.of(pool, shard, GENERATION) for name, pool in pools.items()
        }
        regions = {name: one.region() for name, one in memory.items()}
        attachment = Attachment.open(dock, plan, NAMESPACE, regions, settings)
        return cls(attachment, memory)

    def put(self, numbers: range) -> None:
        """Store pages in every pool."""
        for memory in self.memory.values():
            for at, number in enumerate(numbers):
                memory.fill(at, number)
        pages = {name: range(len(numbers)) for name in self.memory}
        self.attachment.put(hashes(numbers), pages)

    def found(self, pool: str, numbers: range) -> list[int]:
        """Return which pages of a pool are there."""
        deadline_s = time.monotonic() + 60
        there = self.attachment[pool].exists(hashes(numbers), deadline_s)
        return [numbers[at] for at in np.flatnonzero(there).tolist()]

    def right(self, pool: str, numbers: range) -> list[int]:
        """Load pages of a pool; return those that are there with the right bytes.

        Raises:
            AssertionError: If a page that counts as loaded is wrong.
        """
        memory = self.memory[pool]
        deadline_s = time.monotonic() + 60
        outcomes = self.attachment[pool].get(
            hashes(numbers), range(len(numbers)), deadline_s
        )
        found = []
        for at, number in enumerate(numbers):
            if not outcomes[at]:
                assert memory.holds(at, number), f"page {number} of {pool} is wrong"
                found.append(number)
        return found


def generations() -> list[range]:
    return [range(n * GENERATION, (n + 1) * GENERATION) for n in range(GENERATIONS)]


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _mark(root: Path) -> None:
    """Give records of one segment fields that nothing writes by default."""
    index = min((root / DIGEST).glob("kv.*/*.idx"))
    name = IndexName.parse(index.name)
    assert name
    with index.open("r+b", buffering=0) as file:
        fd = file.fileno()
        contents = read_contents(fd, name, index.with_name(name.data).stat().st_size)
        assert contents
        live = np.flatnonzero(contents.records["check"] != 0)
        chosen = live[:6]
        records = contents.records[chosen]
        # The last seconds of the field, and of the past.
        records["expire_at"] = [2**32 - 1, 2**32 - 1, 1, 1, 0, 0]
        records["keep_until"] = [1, 0, 2**32 - 1, 0, 2**32 - 1, 0]
        records["tenant"], records["key_id"] = 7, 9
        write_records(fd, chosen, with_checksums(records))
        one = np.ones(1, np.int64)
        failed = live[6:7]
        write_records(fd, failed, failed_records(name.segment, failed, one, one))


def main(folder: Path) -> None:
    """Write the sample and what is expected of it."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "store"
        ranks = [Rank.open(root, shard) for shard in RANKS]
        for numbers in generations():
            for rank in ranks:
                rank.put(numbers)
            for rank in ranks:
                for pool in rank.memory:
                    rank.right(pool, KEPT)
        for rank in ranks:
            rank.attachment.close()
        _mark(root)
        ranks = [Rank.open(root, shard) for shard in RANKS]
        expected = {
            f"{pool}.{at}": [
                page for numbers in generations() for page in rank.right(pool, numbers)
            ]
            for at, rank in enumerate(ranks)
            for pool in rank.memory
        }
        for rank in ranks:
            rank.attachment.close()
        with tarfile.open(folder / f"{SAMPLE}.tar.xz", "w:xz") as archive:
            archive.add(root, "store", filter=_without_owner)
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(pages)}" for name, pages in expected.items()
    )
    (folder / f"{SAMPLE}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
