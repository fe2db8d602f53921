"""Measure LMCache's second level: its own file adapter, and kvdock's file through ours.

Usage: python benchmarks/lmcache_l2.py [--dir DIR] [--turns N] [--in-flight N]

Run it with an interpreter that has LMCache, kvdock-lmcache and kvdock-file, as
`make bench-lmcache` does. What is called are the parts of `lmcache bench l2`: its keys,
its objects, its rounds of stores and loads. Both sides have the same of them, in one
process, in turns that alternate, each on an empty folder; one thread moves bytes for a
task on either side. Bytes are compared after each turn. Processor seconds are those of
the whole process, system calls included.

The last line is one JSON object. The module has another name than what it measures:
a script's own folder is the first place for imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe

KEYS = 32
MIB = 1 << 20
SIZES = {"256_kib": (256 << 10, 20), "1_mib": (MIB, 10)}
"""Size of an object and rounds of a turn: 160 MiB, or 320, after the first round."""
ADAPTER = "kvdock_lmcache.adapter"
L2 = "lmcache.v1.distributed.l2_adapters"


class Parts:
    """LMCache's own benchmark."""

    def __init__(self) -> None:
        bench = "lmcache.cli.commands.bench.l2_adapter_bench"
        self.data: Any = importlib.import_module(f"{bench}.data")
        self.runner: Any = importlib.import_module(f"{bench}.runner")
        self.config: Any = importlib.import_module(f"{L2}.config")
        self.make: Any = importlib.import_module(L2).create_l2_adapter

    def adapter(self, side: str, folder: Path, arena: Any) -> Any:  # noqa: ANN401 - LMCache's adapter
        """Return an adapter on an empty folder."""
        folder.mkdir(mode=0o700)
        spec: dict[str, Any] = {"type": "fs", "base_path": str(folder)}
        if side == "kvdock":
            own = {"root": str(folder), "threads": 1, "free_space": "1 MiB"}
            spec = {
                "type": "plugin",
                "module_path": ADAPTER,
                "class_name": "KvdockL2Adapter",
                "adapter_params": {"plugin": "file", "revision": "r", **own},
            }
        given = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        found = self.config.parse_args_to_l2_adapters_config(given).adapters[0]
        described = self.data.create_l1_memory_desc(arena, align_bytes=4096)
        return self.make(found, l1_memory_desc=described)


def zeroing_s(objects: list[list[Any]]) -> float:
    """Return the processor seconds of zeroing all objects once."""
    began_s = time.process_time()
    for one in objects:
        for memory in one:
            memory.raw_data.zero_()
    return time.process_time() - began_s


def turn(parts: Parts, side: str, folder: Path, size: str, in_flight: int) -> Any:  # noqa: ANN401 - figures
    """Store and load on one side; return MiB/s and processor seconds per GiB."""
    nbytes, rounds = SIZES[size]
    per_round = KEYS * in_flight
    arena = parts.data.make_aligned_tensor(2 * per_round * nbytes, 4096)

    def keys(number: int) -> list[Any]:
        first = number * per_round
        return [
            parts.data.make_object_keys(KEYS, key_offset=first + at * KEYS)
            for at in range(in_flight)
        ]

    def objects(half: int) -> list[Any]:
        # Filling them also touches all of the memory.
        start = half * per_round * nbytes
        return [
            parts.data.make_memory_objects(
                arena, KEYS, nbytes, start + at * KEYS * nbytes, fill_offset=half
            )
            for at in range(in_flight)
        ]

    stores, loads = objects(0), objects(1)
    adapter = parts.adapter(side, folder, arena)
    found: dict[str, float] = {}
    try:
        for name, own in (("store", stores), ("load", loads)):
            bench = getattr(parts.runner, f"bench_{name}")

            run = partial(
                bench,
                adapter,
                in_flight=in_flight,
                num_keys=KEYS,
                data_size=nbytes,
                objs_for_round=lambda _, own=own: own,
                log=lambda _: None,
            )
            # The first round opens what is opened once.
            run(rounds=1, keys_for_round=keys)
            began_s = time.process_time()
            result = run(rounds=rounds, keys_for_round=lambda number: keys(1 + number))
            cpu_s = time.process_time() - began_s
            if name == "load":
                cpu_s -= rounds * zeroing_s(own)
                run(rounds=1, keys_for_round=lambda _: keys(rounds))
            whole = rounds * per_round
            if sum(result.success_counts) != whole:
                raise SystemExit(f"{side}: not every {name} succeeded")
            found[name] = whole * nbytes / MIB / sum(result.round_durations)
            found[f"{name}_cpu"] = cpu_s / (whole * nbytes / 2**30)
        flat = [[one for part in own for one in part] for own in (stores, loads)]
        for one, other in zip(*flat, strict=True):
            if not one.raw_data.equal(other.raw_data):
                raise SystemExit(f"{side}: wrong bytes")
    finally:
        adapter.close()
        shutil.rmtree(folder)
    return found


def main() -> None:
    """Let both sides take turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=None, help="of the stores")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--in-flight", type=int, default=1, help="tasks at once")
    args = parser.parse_args()
    parts = Parts()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvdock-lmcache-", dir=args.dir) as top:
        machine = describe(Path(top))
        for size in SIZES:
            turns: dict[str, list[Any]] = {"fs": [], "kvdock": []}
            for number in range(args.turns + 1):
                for side in list(turns)[:: 1 if number % 2 else -1]:
                    one = turn(parts, side, Path(top) / side, size, args.in_flight)
                    if number:  # the first one warms the machine
                        turns[side].append(one)
            median = {
                side: {
                    name: statistics.median(one[name] for one in some)
                    for name in some[0]
                }
                for side, some in turns.items()
            }
            own = median["kvdock"]
            ratios = {name: own[name] / value for name, value in median["fs"].items()}
            figures[size] = {**median, "kvdock_vs_fs": ratios}
            for side, one in figures[size].items():
                print(
                    f"{size:8s} {side:13s} store {one['store']:8.2f} load "
                    f"{one['load']:8.2f}; processor, store {one['store_cpu']:6.2f} "
                    f"load {one['load_cpu']:6.2f}"
                )
    print("MiB/s, processor seconds per GiB, and kvdock's of fs's")
    rounded = json.loads(
        json.dumps(figures), parse_float=lambda one: round(float(one), 3)
    )
    print(json.dumps({"machine": machine, "figures": rounded}))


if __name__ == "__main__":
    main()
