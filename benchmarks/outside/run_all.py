"""Measure kvdock by what others wrote: their stores, their interfaces, their oracle.

Usage: run_all.py [--quick] [--dir DIR] [--trace FILE] [--turns N] [--save]

`make bench-outside` runs it in an environment of its own, which has LMDB, RocksDB and
kvcache-simulator from the package index. Four parts:

- stores: SQLite, LMDB, RocksDB and files beside kvdock (`side_by_side.py`);
- mlperf: MLPerf Storage's interface, conversations of eight users, entries of 4 to 32
  MiB (`mlperf_storage.py`);
- mooncake: Mooncake's interface, a replayed trace, a page a call
  (`mooncake_storage.py`);
- hit_rates: LRU and optimum, computed by kvcache-simulator (`hit_rates.py`).

Stores are in /dev/shm unless a folder is given, and nothing is synced. Both sides of a
comparison take turns within one run. A trace is JSON lines with `hash_ids`, like the
published ones of Mooncake; by default conversations are generated. The last line is
one JSON object; with --save the figures are kept in benchmarks/results/outside.json, of
which docs/fill_benchmarks.py makes the page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BENCHMARKS = Path(__file__).parents[1]
# At the end: scripts of that folder have the names of libraries.
sys.path.append(str(BENCHMARKS))

import hit_rates  # noqa: E402 - found by the path above
import mlperf_storage  # noqa: E402 - same
import mooncake_storage  # noqa: E402 - same
import side_by_side  # noqa: E402 - same
from eviction_loads import conversations  # noqa: E402 - same
from machine import describe  # noqa: E402 - same

from kvdock_cli.simulation.traces import read_trace  # noqa: E402 - same

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
IN_MEMORY = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
RESULT = BENCHMARKS / "results" / "outside.json"
TOKEN_BYTES = 128 << 10
"""Of an 8B model's KV cache: 32 layers, 8 heads of 128, two bytes, K and V."""
REPLAYED_BYTES = 1 << 20
"""Of a page of the replayed trace."""

Requests = Sequence[npt.NDArray[np.int64]]
Times = dict[str, list[float]]
"""What was timed, and the milliseconds of each call."""


def conversation_ms(storage: Any, *, small: bool) -> Times:  # noqa: ANN401 - either of two
    """Let users talk: each turn reads all that they have and adds an entry."""
    rng = np.random.default_rng(3)
    users, turns = (2, 2) if small else (8, 4)
    widest = 256 if not small else 48
    noise = rng.integers(0, 1 << 16, widest * TOKEN_BYTES // 2, np.uint16)
    entries = noise.view(np.float16)
    times: Times = {"read": [], "write": []}
    for turn in range(turns):
        for user in range(users):
            for earlier in range(turn):
                data, timing = storage.read(f"{user}-{earlier}")
                times["read"].append(1e3 * timing.total)
                if data[:2].tobytes() != entries[: 2 * 64].tobytes():
                    raise SystemExit("wrong bytes")
            tokens = int(rng.integers(32, widest))
            data = entries[: tokens * TOKEN_BYTES // 2].reshape(-1, 64)
            timing = storage.write(f"{user}-{turn}", data)
            times["write"].append(1e3 * timing.total)
    storage.clear()
    return times


def head_of(requests: Requests, most_pages: int) -> Requests:
    """Return the first requests that have no more different blocks than that."""
    known: set[int] = set()
    for number, request in enumerate(requests):
        known.update(request.tolist())
        if len(known) > most_pages:
            return requests[:number]
    return requests


def in_turns(
    peer: Callable[[int], Times], kvdock: Callable[[int], Times], turns: int
) -> dict[str, Any]:
    """Let both take turns, the first of which only warms up; return the figures.

    Args:
        peer: Runs the load of a turn on the other store.
        kvdock: The same on kvdock.
        turns: Turns that count.
    """
    ratios: dict[str, list[float]] = {}
    every: dict[str, Times] = {"peer": {}, "kvdock": {}}
    for number in range(turns + 1):
        processor_s: dict[str, float] = {}
        taken: dict[str, Times] = {}
        order = [("peer", peer), ("kvdock", kvdock)]
        for name, run in order[:: 1 if number % 2 else -1]:
            begun = time.process_time()
            taken[name] = run(number)
            processor_s[name] = time.process_time() - begun
        if not number:
            continue
        for what, ours in taken["kvdock"].items():
            ratio = sum(taken["peer"][what]) / sum(ours)
            ratios.setdefault(what, []).append(ratio)
        ratio = processor_s["peer"] / processor_s["kvdock"]
        ratios.setdefault("processor", []).append(ratio)
        for name, times in taken.items():
            for what, some in times.items():
                every[name].setdefault(what, []).extend(some)
    figures: dict[str, Any] = {
        name: {
            f"{what}_ms": {
                "p50": round(float(np.percentile(some, 50)), 3),
                "p95": round(float(np.percentile(some, 95)), 3),
            }
            for what, some in times.items()
        }
        for name, times in every.items()
    }
    figures["seconds_over_kvdock"] = {
        what: round(statistics.median(some), 2) for what, some in ratios.items()
    }
    print(json.dumps(figures, indent=1), flush=True)
    return figures


def mlperf(folder: Path, turns: int, *, small: bool) -> dict[str, Any]:
    """Compare through MLPerf Storage's interface."""
    for name in ("npy", "kvdock"):
        (folder / name).mkdir(mode=0o700)
    files = mlperf_storage.NumpyFiles(folder / "npy")
    quota_bytes = (256 if small else 2048) << 20
    kvdock = mlperf_storage.KvdockEntries(folder / "kvdock", quota_bytes)
    try:
        return in_turns(
            lambda _: conversation_ms(files, small=small),
            lambda _: conversation_ms(kvdock, small=small),
            turns,
        )
    finally:
        kvdock.close()


def mooncake(
    folder: Path, requests: Requests, turns: int, *, small: bool
) -> dict[str, Any]:
    """Compare through the interface of Mooncake's storage benchmark."""
    most_pages, page_bytes = 768, REPLAYED_BYTES >> (4 if small else 0)
    replayed = head_of(requests, most_pages)
    for name in ("slots", "kvdock"):
        (folder / name).mkdir(mode=0o700)
    args = (page_bytes, most_pages)
    slots = mooncake_storage.SlotFile(folder / "slots", *args)
    kvdock = mooncake_storage.KvdockPages(folder / "kvdock", *args)

    def run(
        storage: mooncake_storage.SlotFile | mooncake_storage.KvdockPages, turn: int
    ) -> Times:
        # Blocks of another turn are other pages.
        first = turn << 40
        numbers = [(first + one).tolist() for one in replayed]
        reads, writes = mooncake_storage.replay(storage, numbers)
        return {"read": reads, "write": writes}

    if sum(map(len, replayed)) == len(set().union(*map(np.ndarray.tolist, replayed))):
        raise SystemExit("no block comes twice: nothing would be read")
    try:
        figures = in_turns(lambda n: run(slots, n), lambda n: run(kvdock, n), turns)
    finally:
        slots.close()
        kvdock.close()
    return figures | {"requests": len(replayed)}


def main(arguments: Sequence[str]) -> None:
    """Run all parts, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few pages, two turns")
    parser.add_argument("--dir", type=Path, default=IN_MEMORY, help="of the stores")
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--turns", type=int, help="turns that count: 7")
    parser.add_argument("--save", action="store_true", help="keep them for the page")
    given = parser.parse_args(arguments)
    small: bool = given.quick
    turns: int = given.turns or (2 if small else 7)
    count = 200 if small else 800
    trace = read_trace(given.trace, count) if given.trace else conversations(count)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvdock-outside-", dir=given.dir) as top:
        folder = Path(top)
        machine = describe(folder)
        print("== stores that people have at hand", flush=True)
        figures["stores"] = side_by_side.measure(folder, turns, small=small)
        for name in ("mlperf", "mooncake"):
            (folder / name).mkdir()
        print("\n== mlperf: milliseconds, and seconds over kvdock's", flush=True)
        figures["mlperf"] = mlperf(folder / "mlperf", turns, small=small)
        print("\n== mooncake: the same", flush=True)
        figures["mooncake"] = mooncake(
            folder / "mooncake", trace.requests, turns, small=small
        )
    print("\n== hit rates of kvdock's LRU and optimum, and of kvcache-simulator's")
    figures["hit_rates"] = hit_rates.measure(trace.requests)
    whole = {
        "machine": machine,
        "load": trace.name,
        "turns": turns,
        "quick": small,
        "figures": figures,
    }
    if given.save:
        RESULT.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))


if __name__ == "__main__":
    main(sys.argv[1:])
