"""What it costs to move pages of an engine that uses them again at once.

Usage: python benchmarks/safe.py [--dir DIR] [--rounds N] [--sizes 64K ...]

Three attachments of the file backend over the same memory take turns with the same
batches of 128 pages, through `Attachment`: zero copy (`staging = "routed"`), gated
("safe") and staged ("always"). A figure is the median over rounds of the ratio
within a round. The last line is a JSON object; the whole of it is also written to
benchmarks/results/safe.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from file_contenders import Pool
from machine import describe

from kvdock import (
    Attachment,
    Dock,
    DType,
    Namespace,
    Part,
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, structure

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20, "4M": 4 << 20}
WAYS = {"zero_copy": "routed", "gated": "safe", "staged": "always"}
BATCH = 128
MOST_BYTES = 256 << 20
QUOTA = 1 << 30
RESULT = Path(__file__).parent / "results" / "safe.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it


def attached(folder: Path, way: str, pool: Pool) -> Attachment:
    """Attach the memory of a pool; puts read its source, gets fill its target."""
    spec = PoolSpec(
        name="kv", kind=PoolKind.K_ONLY, layers=[0], page_tokens=1, anchor=True,
        parts=[Part("k", DType.U8, (pool.page_bytes,))],
    )  # fmt: skip
    dock = Dock.load()
    core = structure(CoreSettings, {"calls": {"staging": way}}, where="benchmark")
    plan = dock.plan(
        [spec], Shard(), ["file"], needs=RouteRequirements(staging=core.calls.staging)
    )
    both = np.concatenate([pool.source, pool.target])
    regions = {"kv": Region.of(spec, Shard(), [both], len(both))}
    settings = {"file": {"root": folder, "free_space": 0, "quota": QUOTA}}
    return Attachment.open(
        dock, plan, Namespace(model="benchmark"), regions, settings, core=core
    )


@attrs.define(eq=False)
class Contender:
    """One attachment and the seconds of its batches."""

    cache: Attachment
    pages: int
    put: list[float] = attrs.field(factory=list)
    get: list[float] = attrs.field(factory=list)

    def turn(self, operation: str, number: int) -> None:
        """Move all pages once, in batches; refuse to time what fails."""
        first = 0 if operation == "put" else self.pages
        took = 0.0
        for start in range(0, self.pages, BATCH):
            rows = range(start, min(start + BATCH, self.pages))
            names = [f"{(number << 32) + row:064x}" for row in rows]
            pages = {"kv": np.array(rows) + first}
            if operation == "put":
                self.cache.exists(names)
            began = time.perf_counter()
            moved = getattr(self.cache, operation)(names, pages)
            took += time.perf_counter() - began
            if moved.pages != len(rows):
                raise RuntimeError(f"{operation} moved {moved.pages} of {len(rows)}")
        getattr(self, operation).append(took)


def measure(folder: Path, page_bytes: int, rounds: int) -> dict[str, Contender]:
    """Let the three ways take turns; the first round warms them up."""
    pages = min(BATCH * 4, max(BATCH // 2, MOST_BYTES // 4 // page_bytes))
    found = {
        name: Contender(attached(folder / name, way, Pool.of(pages, page_bytes)), pages)
        for name, way in WAYS.items()
    }
    for number in range(rounds + 1):
        for operation in ("put", "get"):
            for one in found.values():
                one.turn(operation, number)
    for one in found.values():
        one.put, one.get = one.put[1:], one.get[1:]
        one.cache.close()
    return found


def ratio(found: dict[str, Contender], way: str, operation: str) -> float:
    """Return the throughput of a way over zero copy, the median over rounds."""
    pairs = zip(
        getattr(found["zero_copy"], operation),
        getattr(found[way], operation),
        strict=True,
    )
    return float(statistics.median(fastest / took for fastest, took in pairs))


def main() -> None:
    """Measure all sizes and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    parser.add_argument("--dir", type=Path, default=where, help="folder to measure in")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    args = parser.parse_args()
    speeds: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    for label in args.sizes:
        folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=args.dir))
        try:
            found = measure(folder, SIZES[label], args.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for operation in ("put", "get"):
            for name, one in found.items():
                median = statistics.median(getattr(one, operation))
                gib = one.pages * SIZES[label] / 2**30 / median
                speeds.setdefault(label, {})[f"{operation}_{name}_gib_s"] = round(
                    gib, 2
                )
                if name != "zero_copy":
                    key = f"{operation}_{name}_over_zero_copy"
                    share = round(ratio(found, name, operation), 2)
                    figures.setdefault(key, {})[label] = share
        print(label, speeds[label], flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    about = describe(args.dir)
    RESULT.write_text(
        json.dumps({"machine": about, "speeds": speeds, "figures": figures}, indent=1)
        + "\n"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
