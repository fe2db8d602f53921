"""What sealing costs, over the library's own AES-GCM on as many bytes.

Usage: python benchmarks/seal.py [--quick] [--dir DIR]

Layer: `Attachment` and everything below it, over the file backend in memory
(/dev/shm) unless a folder is given. Two attachments store and load the same pages in
batches of 8 MiB, one sealed and one not, and beside them the library encrypts and
decrypts the same bytes from and to warm memory, one message for each page. All take
turns within one process. The figure is (sealed - unsealed) / library, each the lower
quartile of its calls: a machine that others use as well only adds. It should be at
most 1.3. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from machine import describe

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.pools import Part
from kvdock.wrappers.key_ring import add_key

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20}
BATCH_BYTES = 8 << 20
QUOTA_BYTES = 192 << 20
GOAL = 1.3
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
_MASTER = bytes(range(32))

Memory = npt.NDArray[np.uint8]
Wrap = Sequence[Mapping[str, object]]


@attrs.define(eq=False)
class Cache:
    """An attachment over a full store, and the number of the next new prefix."""

    attachment: Attachment
    pages: int
    turn: int = 0
    names: list[str] = attrs.field(factory=list)

    @classmethod
    def of(
        cls, root: Path, memory: Memory, wrap: Sequence[Mapping[str, object]]
    ) -> Cache:
        """Attach one pool, and fill the store."""
        pages, page_bytes = memory.shape
        pool = PoolSpec(
            name="kv", kind="k_only", parts=[Part("k", "u8", (page_bytes // 16,))],
            layers=[0], page_tokens=16, anchor=True,
        )  # fmt: skip
        settings = {
            "disk": {
                "plugin": "file", "root": root, "quota": QUOTA_BYTES,
                "free_space": 0, "wrap": wrap,
            }
        }  # fmt: skip
        dock = Dock.load(require=["disk"], only=["disk"], settings=settings)
        plan = dock.plan([pool], Shard(), prefer=["disk"])
        regions = {"kv": Region.of(pool, Shard(), [memory], pages)}
        cache = cls(
            Attachment.open(dock, plan, Namespace(model="m"), regions, settings), pages
        )
        for _ in range(QUOTA_BYTES // memory.nbytes + 4):
            cache.put()
        return cache

    def put(self, pages: int = 0) -> float:
        """Store new pages, all by default; return the seconds."""
        self.turn += 1
        count = pages or self.pages
        names = [f"{self.turn:032x}{page:032x}" for page in range(count)]
        self.attachment.exists(names)
        where = {"kv": np.arange(count)}
        began = time.perf_counter()
        moved = self.attachment.put(names, where)
        took = time.perf_counter() - began
        assert moved.pages == count, moved  # noqa: S101 - else it measures nothing
        self.names = names
        return took

    def get(self) -> float:
        """Load the pages that were stored last; return the seconds."""
        where = {"kv": np.arange(len(self.names))}
        began = time.perf_counter()
        moved = self.attachment.get(self.names, where)
        took = time.perf_counter() - began
        assert moved.pages == len(self.names), moved  # noqa: S101 - same
        return took


class Library:
    """AES-GCM alone: a message for each page, from and to warm memory."""

    def __init__(self, memory: Memory) -> None:
        self._aead = AESGCM(bytes(32))
        sealed = np.zeros((len(memory), memory.shape[1] + 16), np.uint8)
        self._rows = [
            (os.urandom(12), plain.data, room.data)
            for plain, room in zip(memory, sealed, strict=True)
        ]

    def put(self, pages: int = 0) -> float:
        """Encrypt."""
        began = time.perf_counter()
        for nonce, plain, sealed in self._rows[: pages or None]:
            self._aead.encrypt_into(nonce, plain, b"about", sealed)
        return time.perf_counter() - began

    def get(self, pages: int = 0) -> float:
        """Decrypt."""
        began = time.perf_counter()
        for nonce, plain, sealed in self._rows[: pages or None]:
            self._aead.decrypt_into(nonce, sealed, b"about", plain)
        return time.perf_counter() - began


def measure(root: Path, page_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each call and each way its seconds."""
    pages = BATCH_BYTES // page_bytes
    chance = np.random.default_rng(7)
    memory = chance.integers(0, 256, (pages, page_bytes), np.uint8)
    keys = root / "keys.json"
    add_key(keys, _MASTER, "default")
    master = root / "master"
    master.write_bytes(_MASTER)
    wrap = [{"name": "seal", "keys": keys, "master_file": master}]
    ways: dict[str, Cache | Library] = {
        "plain": Cache.of(root / "plain", memory, []),
        "sealed": Cache.of(root / "sealed", memory, wrap),
        "library": Library(memory.copy()),
    }
    took: dict[str, dict[str, list[float]]] = {
        call: {way: [] for way in ways} for call in ("put", "get", "put1", "get1")
    }
    for turn in range(rounds):
        names = list(ways)[turn % 3 :] + list(ways)[: turn % 3]
        for calls, count in ((("put", "get"), 0), (("put1", "get1"), 1)):
            for way in names:
                one = ways[way]
                for _ in range(2 if count == 0 else 6):
                    put = one.put(count)
                    get = one.get(count) if isinstance(one, Library) else one.get()
                    took[calls[0]][way].append(put)
                    took[calls[1]][way].append(get)
    for one in ways.values():
        if isinstance(one, Cache):
            one.attachment.close()
    return {
        call: {way: float(np.quantile(each, 0.25)) for way, each in by.items()}
        for call, by in took.items()
    }


def main(arguments: list[str]) -> int:
    """Measure, print a table and one line of JSON; 1 where the goal is missed."""
    rounds = 8 if "--quick" in arguments else 40
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    if "--dir" in arguments:
        folder = Path(arguments[arguments.index("--dir") + 1])
    figures: dict[str, float] = {}
    for size, page_bytes in SIZES.items():
        root = Path(tempfile.mkdtemp(prefix="kvdock-seal-", dir=folder))
        try:
            found = measure(root, page_bytes, rounds)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        for call, by in found.items():
            over = (by["sealed"] - by["plain"]) / by["library"]
            cells = "  ".join(f"{way} {s * 1e6:8.0f} us" for way, s in by.items())
            print(f"{size:>5} {call:4}  {cells}  over {over:5.2f}")
            figures[f"seal_{call}_{size}_over_library"] = round(over, 2)
    machine = describe(folder)
    print(json.dumps({"seal_load_average": machine["load_average"]} | figures))
    # Calls of one page have their own fixed cost, which is not the cipher's.
    whole = [value for name, value in figures.items() if "1_" not in name]
    return int(max(whole) > GOAL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
