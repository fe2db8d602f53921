"""What it costs to move pages of an engine that uses them again at once.

Usage: python benchmarks/safe.py [--dir DIR] [--rounds N] [--sizes 64K ...]

Attachments of the file backend over equal memory take turns with batches of 128
pages, through `Attachment`: zero copy (`staging = "routed"`), gated ("safe"), staged
("always") in pieces and in whole batches. A figure is the ratio of the lower
quartiles of all batches, by the clock and in processor time of all threads, which a
busy machine changes less. The last line is a JSON object; the whole of it is also
written to benchmarks/results/safe.json.
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
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, structure
from kvdock.pools import Part

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20, "4M": 4 << 20}
WAYS: dict[str, dict[str, object]] = {
    "zero_copy": {"staging": "routed"},
    "gated": {"staging": "safe"},
    "staged": {"staging": "always"},
    "staged_whole": {"staging": "always", "staging_bytes": 32 << 20},
}
BATCH = 128
MOST_BYTES = 256 << 20
QUOTA = 1 << 30
RESULT = Path(__file__).parent / "results" / "safe.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it


def attached(folder: Path, calls: dict[str, object], pool: Pool) -> Attachment:
    """Attach the memory of a pool; puts read its source, gets fill its target."""
    spec = PoolSpec(
        name="kv", kind=PoolKind.K_ONLY, layers=[0], page_tokens=1, anchor=True,
        parts=[Part("k", DType.U8, (pool.page_bytes,))],
    )  # fmt: skip
    dock = Dock.load()
    core = structure(
        CoreSettings,
        # A busy machine is slow, which is not what is measured.
        {"calls": calls, "deadlines": {"get": "60 s", "put": "60 s"}},
        where="benchmark",
    )
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
    """One attachment, and what each of its batches took.

    Args:
        cache: The attachment.
        pages: How many it moves in a round.
        seconds: Of each batch, by operation.
        cpu_s: Processor seconds of each batch, all threads together.
    """

    cache: Attachment
    pages: int
    seconds: dict[str, list[float]] = attrs.field(
        factory=lambda: {"put": [], "get": []}
    )
    cpu_s: dict[str, list[float]] = attrs.field(factory=lambda: {"put": [], "get": []})

    def move(self, operation: str, number: int, start: int) -> None:
        """Move one batch of a round; refuse to time what fails."""
        rows = range(start, min(start + BATCH, self.pages))
        names = [f"{(number << 32) + row:064x}" for row in rows]
        pages = {"kv": np.array(rows) + (0 if operation == "put" else self.pages)}
        if operation == "put":
            self.cache.exists(names)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        moved = getattr(self.cache, operation)(names, pages)
        took_s = time.perf_counter() - began_s
        took_cpu_s = time.process_time() - began_cpu_s
        if moved.pages != len(rows):
            raise RuntimeError(f"{operation} moved {moved.pages} of {len(rows)}")
        if number:
            self.seconds[operation].append(took_s)
            self.cpu_s[operation].append(took_cpu_s)


def lower_quartile(took: list[float]) -> float:
    """Return what a batch takes that others of the machine disturb little."""
    return statistics.quantiles(took, n=4)[0]


def measure(folder: Path, page_bytes: int, rounds: int) -> dict[str, Contender]:
    """Let the three ways take turns, batch by batch; the first round warms up."""
    pages = min(BATCH * 4, max(BATCH // 2, MOST_BYTES // 4 // page_bytes))
    found = {
        name: Contender(
            attached(folder / name, calls, Pool.of(pages, page_bytes)), pages
        )
        for name, calls in WAYS.items()
    }
    for number in range(rounds + 1):
        for operation in ("put", "get"):
            for start in range(0, pages, BATCH):
                for one in found.values():
                    one.move(operation, number, start)
    for one in found.values():
        one.cache.close()
    return found


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
            fastest = found["zero_copy"]
            for name, one in found.items():
                took_s = lower_quartile(one.seconds[operation])
                nbytes = min(BATCH, one.pages) * SIZES[label]
                speed = round(nbytes / 2**30 / took_s, 2)
                speeds.setdefault(label, {})[f"{operation}_{name}_gib_s"] = speed
                if one is fastest:
                    continue
                cpu = lower_quartile(fastest.cpu_s[operation]) / lower_quartile(
                    one.cpu_s[operation]
                )
                wall = lower_quartile(fastest.seconds[operation]) / took_s
                for word, share in (("", wall), ("_cpu", cpu)):
                    key = f"{operation}_{name}_over_zero_copy{word}"
                    figures.setdefault(key, {})[label] = round(share, 2)
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
