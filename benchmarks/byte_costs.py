"""What a byte costs on each way through kvdock: copies, hashes, processor time.

Usage: python benchmarks/byte_costs.py [--quick] [--dir DIR]

Batches of 128 pages of 64 KiB are stored and loaded over the file backend in a folder
of the temporary one, or of DIR: as they are, past the page cache, through memory of the
core, with trailers, sealed, in the background as vLLM moves them, and through two
tiers. For each byte of the pages it counts how many the kernel moved (through the page
cache that is a copy, past it none), how many kvdock copied, hashed and ciphered; a
count above its limit is an error. Then the same calls are timed: processor seconds of
all threads for each GiB, the lower quartile. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import xxhash

from kvdock import (
    Attachment,
    Dock,
    Namespace,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
    TransferManager,
    native,
)
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part
from kvdock.wrappers.key_ring import Subkey, add_key

PAGES, PAGE_BYTES = 128, 64 << 10
BATCH_BYTES = PAGES * PAGE_BYTES
WARM_TURNS = 12
"""After which the store of eight batches is full."""
KINDS = ("kernel", "copied", "hashed", "ciphered")
LIMITS: Mapping[str, Mapping[str, tuple[float, float, float, float]]] = {
    "plain": {"put": (1.05, 0, 1.01, 0), "get": (1.05, 0, 1.01, 0)},
    "direct": {"put": (1.05, 0, 1.01, 0), "get": (1.05, 0, 1.01, 0)},
    "safe": {"put": (1.05, 1.01, 1.01, 0), "get": (1.05, 1.01, 1.01, 0)},
    "trailers": {"put": (1.05, 0, 2.01, 0), "get": (1.05, 0, 2.01, 0)},
    "sealed": {"put": (1.05, 0, 1.01, 1.01), "get": (1.05, 0, 1.01, 1.01)},
    "background": {"put": (1.05, 0, 1.01, 0), "get": (1.05, 0, 1.01, 0)},
    "tiers": {"put": (3.05, 2.01, 3.01, 0), "get": (1.05, 0, 1.01, 0)},
}
"""Way and operation to the most bytes of each of `KINDS` for each byte of a page."""


class _CountedHash:
    """A hash that counts what it takes."""

    counts: Counter[str]
    made: Any

    def __init__(self) -> None:
        self._state = self.made()
        self.intdigest = self._state.intdigest

    def update(self, data: memoryview) -> None:
        """Count, and hash."""
        self.counts["hashed"] += memoryview(data).nbytes
        self._state.update(data)


def _count_compiled(counts: Counter[str], replaced: list[tuple[Any, str, Any]]) -> None:
    """Count what compiled code moves and hashes, and note what was replaced."""
    moved = native.Movement.move

    def moving(movement: native.Movement, first: int, stop: int) -> None:
        moved(movement, first, stop)
        rows = movement.order[first:stop]
        nbytes = int(movement.nbytes[rows][movement.errors[rows] == 0].sum())
        counts["kernel"] += nbytes
        counts["hashed"] += nbytes if movement.write < 2 else 0

    hashed = native.Movement.hash_rows

    def hash_rows(movement: native.Movement, first: int, stop: int) -> None:
        hashed(movement, first, stop)
        sizes = np.broadcast_to(movement.sizes, movement.addresses.shape)
        counts["hashed"] += int(sizes[movement.order[first:stop]].sum())

    replaced.append((native.Movement, "hash_rows", hashed))
    setattr(native.Movement, "hash_rows", hash_rows)  # noqa: B010 - a method, to type checkers
    replaced.append((native.Movement, "move", moved))
    setattr(native.Movement, "move", moving)  # noqa: B010 - a method, to type checkers
    compiled = native.library()
    if compiled is not None:

        def hashing(real: Any, *given: Any) -> int:  # noqa: ANN401 - a function of ctypes
            done = int(real(*given))
            rows, pieces, stride = given[0] if given[2] else 1, given[1], given[2]
            sizes = (ctypes.c_int64 * (rows * pieces)).from_address(given[4])
            counts["hashed"] += sum(sizes) * (1 if stride else given[0])
            return done

        counting = attrs.evolve(
            compiled,
            hash=partial(hashing, compiled.hash),
            hash_locked=partial(hashing, compiled.hash_locked),
        )
        replaced.append((native, "library", native.library))
        setattr(native, "library", lambda: counting)  # noqa: B010 - same


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes that are moved, copied, hashed and ciphered inside."""
    counts: Counter[str] = Counter()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, kind: str, nbytes: Callable[..., int]) -> None:  # noqa: ANN401 - module or class
        real = getattr(owner, name)

        def counting(*arguments: Any) -> Any:  # noqa: ANN401 - as the real one
            found = real(*arguments)
            counts[kind] += nbytes(found, *arguments)
            return found

        replaced.append((owner, name, real))
        setattr(owner, name, counting)

    for name in ("pread", "preadv", "pwrite", "pwritev"):
        replace(
            os,
            name,
            "kernel",
            lambda found, *_: found if isinstance(found, int) else len(found),
        )
    replace(ctypes, "memmove", "copied", lambda _, to, at, nbytes: nbytes)  # noqa: ARG005 - its names
    for name in ("gather", "scatter"):
        replace(Region, name, "copied", lambda _, region, pages, rows: rows.nbytes)  # noqa: ARG005 - same
    for name in ("seal", "open"):
        replace(Subkey, name, "ciphered", lambda *given: given[4].nbytes)
    replace(
        xxhash,
        "xxh3_64_intdigest",
        "hashed",
        lambda _, data: memoryview(data).nbytes,
    )
    _count_compiled(counts, replaced)
    made = xxhash.xxh3_64
    replaced.append((xxhash, "xxh3_64", made))
    own = {"counts": counts, "made": made}
    setattr(xxhash, "xxh3_64", type("Counted", (_CountedHash,), own))  # noqa: B010 - a type, to type checkers
    try:
        yield counts
    finally:
        for owner, name, real in replaced:
            setattr(owner, name, real)


@attrs.define(eq=False)
class Way:
    """An attachment, and what moves pages through it."""

    attachment: Attachment
    manager: TransferManager | None = None
    names: list[str] = attrs.field(factory=list)
    turn: int = 0

    def put(self) -> None:
        """Store new pages that were looked up."""
        self.turn += 1
        self.names = [f"{self.turn:032x}{at:032x}" for at in range(PAGES)]
        self.attachment.exists(self.names)
        self._move("put")

    def get(self) -> None:
        """Load the pages that were stored last."""
        self._move("get")

    def _move(self, operation: str) -> None:
        pages = np.arange(PAGES)
        if self.manager is None:
            moved = getattr(self.attachment, operation)(self.names, {"kv": pages}).pages
        else:
            move = self.manager.read if operation == "get" else self.manager.write
            future = move("kv", self.names, pages)
            assert future.wait(60)  # noqa: S101 - else it measures nothing
            moved = int((future.outcomes == 0).sum())
        assert moved == PAGES, moved  # noqa: S101 - same


@contextmanager
def way(name: str, root: Path) -> Iterator[Way]:
    """Attach a pool as a way wants it."""
    memory = np.frombuffer(mmap.mmap(-1, BATCH_BYTES), np.uint8).reshape(PAGES, -1)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    disk: dict[str, object] = {
        "plugin": "file", "root": root / "disk", "quota": 8 * BATCH_BYTES,
        "free_space": 0, "direct": name == "direct",
    }  # fmt: skip
    if name == "sealed":
        master = bytes(range(32))
        add_key(root / "keys.json", master, "default")
        (root / "master").write_bytes(master)
        files = {"keys": root / "keys.json", "master_file": root / "master"}
        disk["wrap"] = [{"name": "seal", **files}]
    settings = {"disk": disk}
    if name == "tiers":
        settings["near"] = disk | {"root": root / "near"}
    given: Mapping[str, Mapping[str, object]] = {
        "safe": {"calls": {"staging": "always"}},
        "trailers": {"integrity": "always"},
    }
    core = structure(CoreSettings, given.get(name, {}), where="benchmark")
    order = list(settings)[::-1]
    dock = Dock.load(require=order, only=order, settings=settings)
    needs = RouteRequirements(integrity=core.integrity)
    # The near tier is stored in at once, the far one behind it.
    how: dict[str, Any] = {"tiers": order} if name == "tiers" else {"prefer": order}
    plan = dock.plan([pool], Shard(), needs=needs, settings=settings, **how)
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    attachment = Attachment.open(
        dock, plan, Namespace(model="m"), regions, settings, core=core
    )
    if name == "background":
        with TransferManager(attachment) as manager:
            yield Way(attachment, manager)
    else:
        with attachment:
            yield Way(attachment)


def count(name: str, root: Path) -> dict[str, tuple[float, ...]]:
    """Return the bytes of each of `KINDS` for each byte, of put and of get."""
    found = {}
    with way(name, root) as one:
        for _ in range(WARM_TURNS):
            one.put()
            one.get()
            one.attachment.wait_idle(60)
        for operation in ("put", "get"):
            with counted() as counts:
                getattr(one, operation)()
                one.attachment.wait_idle(60)
            found[operation] = tuple(counts[kind] / BATCH_BYTES for kind in KINDS)
    return found


def spend(name: str, root: Path, rounds: int) -> dict[str, float]:
    """Return processor seconds of all threads for each GiB, of put and of get."""
    took: dict[str, list[float]] = {"put": [], "get": []}
    with way(name, root) as one:
        for turn in range(WARM_TURNS + rounds):
            for operation, seconds in took.items():
                began = time.process_time()
                getattr(one, operation)()
                one.attachment.wait_idle(60)
                if turn >= WARM_TURNS:
                    seconds.append(time.process_time() - began)
    gib = BATCH_BYTES / 2**30
    return {name: float(np.quantile(each, 0.25)) / gib for name, each in took.items()}


def main(arguments: list[str]) -> int:
    """Print both tables; return 1 if a count is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="count, and time nothing")
    parser.add_argument("--dir", help="folder to measure in")
    given = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    status = 0
    print(
        f"{'bytes for each byte':20} {'kernel':>8} {'copied':>8} {'hashed':>8} ciphered"
    )
    for name, limits in LIMITS.items():
        with tempfile.TemporaryDirectory(prefix="kvdock-", dir=given.dir) as root:
            for operation, counts in count(name, Path(root)).items():
                shown = " ".join(f"{one:8.2f}" for one in counts)
                print(f"{name:13} {operation:6} {shown}")
                for kind, one, most in zip(
                    KINDS, counts, limits[operation], strict=True
                ):
                    figures[f"{name}_{operation}_{kind}"] = round(one, 3)
                    if one > most:
                        print(f"{name} {operation}: {kind} is above its limit {most}")
                        status = 1
    if not given.quick:
        print("processor seconds for each GiB")
        for name in LIMITS:
            with tempfile.TemporaryDirectory(prefix="kvdock-", dir=given.dir) as root:
                for operation, seconds in spend(name, Path(root), 40).items():
                    figures[f"{name}_{operation}_cpu"] = round(seconds, 3)
                    print(f"{name:13} {operation:6} {seconds:8.3f}")
    print(json.dumps(figures))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
