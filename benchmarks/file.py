"""Measure the file backend against the machine and against its peers.

Usage: python benchmarks/file.py [--dir DIR] [--disk DIR] [--rounds N]
                                 [--name NAME] [--quick] [--busy N]

Layer: the backend's hook and everything below it; `Attachment` is not part of it.
Pages of 64K to 4M in batches of 128, in order and at random, put and get,
checksums on, memory warm. In memory (/dev/shm) unless a folder of a disk is
given: then the disk's write-back is measured as well. All contenders take turns
within one run, and a figure is the median over rounds of the ratio within a round.
SGLang's HiCacheFile takes part where `.venv-sglang` is in the checkout, which `make
test-sglang` builds, or where TESTS_OF_KVDOCK_SGLANG_PYTHON names its interpreter.
With `--disk` pages of 1M are also moved on a real disk: with O_DIRECT, and buffered
with fsync at the end of each put. With --busy N, N processes that never wait run beside
all contenders. The last line is a JSON object; the whole of it is also written to
benchmarks/results/NAME.json, by default file, or file_busy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import file_fairness
import file_index
import numpy as np
from file_contenders import (
    Contender,
    FilePerPage,
    HiCacheFile,
    Kvdock,
    Pool,
    Raw,
    Rows,
)
from machine import beside, describe, sglang_python

SIZES = {"64K": 64 << 10, "256K": 256 << 10, "1M": 1 << 20, "4M": 4 << 20}
BATCH = 128
ASKED = 1024
FOOTPRINT_BYTES = 256 << 20
INDEXES = {"1e4": 10**4, "1e5": 10**5, "1e6": 10**6, "1e7": 10**7}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
IN_MEMORY = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
"""What is measured is software: a disk's own pauses would drown it."""
RESULTS = Path(__file__).parent / "results"

Seconds = dict[str, dict[str, list[float]]]
"""Contender, then operation and order, then seconds of each round."""


def batches_of(pages: int, *, shuffled: bool) -> Rows:
    """Cut page numbers into batches."""
    numbers = list(range(pages))
    if shuffled:
        numbers = np.random.default_rng(3).permutation(pages).tolist()
    return [numbers[at : at + BATCH] for at in range(0, pages, BATCH)]


def race(contenders: dict[str, Contender], pages: int, rounds: int) -> Seconds:
    """Let contenders take turns; the first round only warms them up."""
    seconds: Seconds = {name: {} for name in contenders}
    turn = 0
    for number in range(rounds + 1):
        for order in ("sequential", "random"):
            turn += 1
            batches = batches_of(pages, shuffled=order == "random")
            for operation in ("put", "get"):
                for name, contender in contenders.items():
                    took = getattr(contender, operation)(batches, turn)
                    if number:
                        key = f"{operation} {order}"
                        seconds[name].setdefault(key, []).append(took)
    return seconds


def ask_all(contenders: dict[str, Contender], turn: int, seconds: Seconds) -> None:
    """Time the question whether 1024 stored pages are there."""
    for name, contender in contenders.items():
        if isinstance(contender, Kvdock | HiCacheFile) and contender.pages >= ASKED:
            took = [contender.exists(ASKED, turn) for _ in range(50)]
            seconds[name]["exists"] = took


def ratio(seconds: Seconds, ours: str, other: str, operation: str) -> float:
    """Return how many times faster ours is, the median over rounds and orders."""
    every = [
        theirs / mine
        for order in ("sequential", "random")
        for mine, theirs in zip(
            seconds[ours][f"{operation} {order}"],
            seconds[other][f"{operation} {order}"],
            strict=True,
        )
    ]
    return statistics.median(every)


def on_disk(
    where: Path, page_bytes: int, rounds: int, *, direct: bool
) -> tuple[Seconds, int]:
    """Race kvdock and raw calls on a real disk: direct, or buffered and synced."""
    folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=where))
    pages = max(BATCH, FOOTPRINT_BYTES // page_bytes)
    pool = Pool.of(pages, page_bytes)
    raw = Raw(folder / "raw", pool, direct=direct, synced=not direct)
    try:
        ours = Kvdock(folder / "kvdock", pool, synced=not direct, direct=direct)
        contenders: dict[str, Contender] = {"raw": raw, "kvdock": ours}
        seconds = race(contenders, pages, rounds)
        ours.close()
    finally:
        raw.close()
        shutil.rmtree(folder, ignore_errors=True)
    return seconds, pages * page_bytes


def disk_figures(where: Path, rounds: int, tables: dict[str, Any]) -> dict[str, float]:
    """Measure pages of 1M on a real disk, add their tables; return the ratios."""
    figures: dict[str, float] = {}
    for label, direct in (("disk_direct", True), ("disk_synced", False)):
        seconds, nbytes = on_disk(where, SIZES["1M"], rounds, direct=direct)
        tables[label] = speeds(seconds, nbytes)
        show(label, tables[label])
        for operation in ("put", "get"):
            found = ratio(seconds, "kvdock", "raw", operation)
            figures[f"{label}_{operation}_vs_raw"] = round(found, 2)
    return figures


def measure_size(
    folder: Path, page_bytes: int, rounds: int, python: str
) -> tuple[Seconds, int]:
    """Race all contenders with pages of one size."""
    pages = max(BATCH, FOOTPRINT_BYTES // page_bytes)
    pool = Pool.of(pages, page_bytes)
    contenders: dict[str, Contender] = {
        "raw": Raw(folder / "raw", pool),
        "raw 2 threads": Raw(folder / "raw2", pool, threads=2),
        "raw and a hash": Raw(folder / "raw3", pool, threads=2, hashed=True),
        "kvdock": Kvdock(folder / "kvdock", pool),
        "file per page": FilePerPage(folder / "files", pool),
    }
    if python:
        contenders["HiCacheFile"] = HiCacheFile(folder / "hicache", pool, python)
    try:
        seconds = race(contenders, pages, rounds)
        ask_all(contenders, 2 * (rounds + 1), seconds)
        wrong = pool.wrong(list(range(pages)))
        if wrong:
            raise RuntimeError(f"{wrong} pages were loaded wrong")
    finally:
        for contender in contenders.values():
            contender.close()
        shutil.rmtree(folder, ignore_errors=True)
    return seconds, pages * page_bytes


def speeds(seconds: Seconds, nbytes: int) -> dict[str, dict[str, float]]:
    """Return the median GB/s of each contender and operation."""
    return {
        name: {
            key: round(nbytes / statistics.median(took) / 1e9, 2)
            for key, took in each.items()
            if key != "exists"
        }
        for name, each in seconds.items()
    }


def show(label: str, table: dict[str, dict[str, float]]) -> None:
    """Print one page size's speeds."""
    print(f"\n{label} pages, GB/s")
    for name, each in table.items():
        cells = "  ".join(f"{key} {value:6.2f}" for key, value in each.items())
        print(f"  {name:14} {cells}", flush=True)


def index_figures(where: Path | None) -> dict[str, Any]:
    """Measure rebuilding, memory and lookups of indexes of all sizes."""
    folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=where))
    found = {}
    try:
        for label, pages in INDEXES.items():
            found[label] = file_index.measure(folder, pages)
            print(f"index of {label} pages: {found[label]}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "rebuild_1m_s": round(found["1e6"]["rebuild_s"], 2),
        "index_bytes_per_page": round(
            max(found[label]["bytes_per_page"] for label in ("1e6", "1e7"))
        ),
        "exists_us_per_key": {
            label: round(one["exists_us_per_key"], 2) for label, one in found.items()
        },
    }


def main() -> None:
    """Read what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--dir", type=Path, default=IN_MEMORY, help="folder to measure in"
    )
    parser.add_argument("--name", help="of the file of results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="no big indexes")
    parser.add_argument("--disk", type=Path, help="folder on a real disk")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside")
    args = parser.parse_args()
    with beside(args.busy):
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Measure what is asked for, and print it."""
    python = sglang_python()
    if not python:
        print("HiCacheFile is left out: `make test-sglang` brings SGLang")
    figures: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for label in args.sizes:
        folder = Path(tempfile.mkdtemp(prefix="kvdock-bench-", dir=args.dir))
        seconds, nbytes = measure_size(folder, SIZES[label], args.rounds, python)
        tables[label] = speeds(seconds, nbytes)
        show(label, tables[label])
        for operation in ("put", "get"):
            for other, word in (
                ("raw", "raw"),
                ("raw 2 threads", "raw_2_threads"),
                ("raw and a hash", "raw_2_threads_hashed"),
                ("HiCacheFile", "hicachefile"),
                ("file per page", "file_per_page"),
            ):
                if other in seconds:
                    found = ratio(seconds, "kvdock", other, operation)
                    name = f"{operation}_vs_{word}"
                    figures.setdefault(name, {})[label] = round(found, 2)
        if "exists" in seconds.get("HiCacheFile", {}):
            asked = {
                name: seconds[name]["exists"] for name in ("kvdock", "HiCacheFile")
            }
            quickest = {name: min(took) for name, took in asked.items()}
            found = quickest["HiCacheFile"] / quickest["kvdock"]
            figures["exists_1024_vs_hicachefile"] = round(found, 1)
    if args.disk is not None:
        figures |= disk_figures(args.disk, args.rounds, tables)
    figures["small_get_us"] = file_fairness.measure(args.dir)
    if not args.quick:
        figures |= index_figures(args.dir)
    RESULTS.mkdir(exist_ok=True)
    whole = {"machine": describe(args.dir), "gb_per_s": tables} | figures
    name = args.name or ("file_busy" if args.busy else "file")
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
