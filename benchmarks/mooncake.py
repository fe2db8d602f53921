"""Measure the mooncake backend against the library's own calls.

Usage: python benchmarks/mooncake.py [--rounds N]

A master and a second process that owns memory run on loopback. The library's
calls on the same buffers, with ready-made lists, and an attachment take turns
within a run; a figure is the median of the ratios within a round.
`prepare_speedup_vs_sglang` compares Python time for a batch of 128 pages and
4 pools with SGLang's own MooncakeStore, both on a store that answers at once;
it needs KVDOCK_SGLANG_PYTHON, an interpreter that has SGLang, and is null
without. The last line is a JSON object, which with more figures is also
written to benchmarks/results/mooncake.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from machine import describe

from kvdock import (
    Attachment,
    Batch,
    Dock,
    DType,
    Namespace,
    Operation,
    Part,
    Per,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
    build_keys,
)
from kvdock.config import CoreSettings, Integrity
from kvdock_mooncake.library import load
from kvdock_mooncake.server import start_master, start_owner

BATCH, PAGE_BYTES = 128, 256 << 10
LOOKUP_KEYS = 1024
CHECKED = ("put_vs_raw", "get_vs_raw", "put_gb_s", "get_gb_s")
RESULT = Path(__file__).parent / "results" / "mooncake.json"
PREPARE = Path(__file__).with_name("mooncake_prepare.py")


class InstantStore:
    """Answers as the library does, without doing anything."""

    def batch_put_from_multi_buffers(self, keys: list[str], *_: object) -> list[int]:
        """Store nothing."""
        return [0] * len(keys)

    def batch_get_into_multi_buffers(
        self, keys: list[str], _: object, sizes: list[list[int]]
    ) -> list[int]:
        """Load nothing."""
        return [sum(sizes[0])] * len(keys)


def flat_pool(name: str, page_bytes: int) -> PoolSpec:
    """Describe a pool whose page is one piece of memory."""
    part = Part("kv", DType.U8, (page_bytes,), per=Per.PAGE)
    return PoolSpec(
        name=name, kind="mla", parts=(part,), layers=(0,), page_tokens=64, anchor=True
    )


def two_part_pools() -> list[PoolSpec]:
    """Describe four pools of keys and values, page after page."""
    parts = tuple(Part(name, "bf16", (2, 8), shard_axis=0) for name in ("k", "v"))
    return [
        PoolSpec(
            name=name,
            kind="mha",
            parts=parts,
            layers=range(4),
            page_tokens=64,
            anchor=name == "kv",
            indices_from=None if name == "kv" else "kv",
            layout="page_first_direct",
        )
        for name in ("kv", "draft", "swa", "draft_swa")
    ]


@attrs.define
class Attached:
    """An attachment, with memory and the client behind it."""

    attachment: Attachment
    memory: dict[str, Any]

    @property
    def client(self) -> Any:  # noqa: ANN401 - the plugin's own
        """The plugin's client, to reach the library behind its back."""
        (attached, *_) = self.attachment.pools_by_name.values()
        handle: Any = attached.handle
        return handle.client


@contextmanager
def attached(
    pools: list[PoolSpec],
    pages: int,
    settings: dict[str, object],
    integrity: Integrity = Integrity.OFF,
) -> Iterator[Attached]:
    """Attach pools with memory of their own.

    Without checksums, unless they are asked for: the library has none, so
    they would be compared with nothing.
    """
    dock = Dock.load(require=("mooncake",))
    needs = RouteRequirements(integrity=integrity)
    plan = dock.plan(pools, Shard(), ("mooncake",), needs=needs)
    memory = {
        pool.name: np.ones(pages * pool.page_bytes(Shard()), np.uint8) for pool in pools
    }
    regions = {
        pool.name: Region.of(pool, Shard(), (memory[pool.name],), pages)
        if pool.layout == "page_object"
        else Region.of(
            pool, Shard(), tuple(np.split(memory[pool.name], len(pool.parts))), pages
        )
        for pool in pools
    }
    given = {"mooncake": settings}
    with Attachment.open(
        dock,
        plan,
        Namespace(model="bench"),
        regions,
        given,
        core=CoreSettings(integrity=integrity),
    ) as one:
        yield Attached(one, memory)


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def hashes_of(round_number: int, count: int) -> list[str]:
    """Return page hashes that no other round has."""
    return [f"{round_number:032x}{page:032x}" for page in range(count)]


def race(one: Attached, rounds: int) -> dict[str, float]:
    """Let the library's calls and the attachment take turns."""
    store = one.client._store  # noqa: SLF001 - a benchmark looks inside
    base = int(one.memory["kv"].ctypes.data)
    pointers = [base + page * PAGE_BYTES for page in range(BATCH)]
    sizes = [PAGE_BYTES] * BATCH
    places = {"kv": np.arange(BATCH)}
    seconds: dict[str, list[float]] = {
        name: [] for name in ("raw_put", "put", "raw_get", "get")
    }
    for turn in range(rounds + 1):
        mine, raw = hashes_of(2 * turn, BATCH), hashes_of(2 * turn + 1, BATCH)
        steps = [
            ("raw_put", lambda raw=raw: store.batch_put_from(raw, pointers, sizes)),
            ("put", lambda mine=mine: one.attachment.put(mine, places)),
            ("raw_get", lambda raw=raw: store.batch_get_into(raw, pointers, sizes)),
            ("get", lambda mine=mine: one.attachment.get(mine, places)),
        ]
        if turn % 2:
            steps[0], steps[1] = steps[1], steps[0]
            steps[2], steps[3] = steps[3], steps[2]
        for name, step in steps:
            took = timed(step)
            if turn:
                seconds[name].append(took)
        store.remove_by_regex(".*", True)
    moved = BATCH * PAGE_BYTES / 1e9
    ratios = {
        f"{name}_vs_raw": statistics.median(
            a / b for a, b in zip(seconds[f"raw_{name}"], seconds[name], strict=True)
        )
        for name in ("put", "get")
    }
    speeds = {f"{n}_gb_s": moved / statistics.median(s) for n, s in seconds.items()}
    return ratios | speeds


def lookup_ms(one: Attached, rounds: int) -> float:
    """Return the median milliseconds of a lookup of 1024 pages that are there."""
    hashes = hashes_of(1 << 20, LOOKUP_KEYS)
    page = np.zeros(LOOKUP_KEYS, np.int64)
    one.attachment.put(hashes, {"kv": page})
    found = one.attachment.exists(hashes).best
    if found != LOOKUP_KEYS:
        raise SystemExit(f"only {found} of {LOOKUP_KEYS} pages are there")
    # What the cache answers is not what is timed here.
    lookup_cache = one.client.lookup_cache
    seconds = []
    for _ in range(rounds):
        lookup_cache.clear()
        seconds.append(timed(lambda: one.attachment.exists(hashes)))
    one.client._store.remove_by_regex(".*", True)  # noqa: SLF001 - a benchmark looks inside
    return 1e3 * statistics.median(seconds)


def preparation_s(settings: dict[str, object], rounds: int) -> float:
    """Return the median seconds of Python for 128 pages of four pools.

    From page hashes and indices to outcomes: keys, addresses, the plugin.
    """
    with attached(two_part_pools(), BATCH, settings) as one:
        client = one.client
        real, client._store = client._store, InstantStore()  # noqa: SLF001 - a benchmark looks inside
        hashes, places = hashes_of(1 << 21, BATCH), np.arange(BATCH)
        berths: list[Any] = list(one.attachment.pools_by_name.values())

        def prepare(operation: Operation) -> None:
            for berth in berths:
                keys = build_keys(one.attachment.namespace, hashes, berth.suffixes)
                addresses, sizes = berth.region.addresses(places)
                done = berth.handle.run(Batch(operation, keys, addresses, sizes))
                if done.outcomes.any():
                    raise SystemExit(f"{operation} did not succeed")

        seconds = []
        for _ in range(4 * rounds):
            began = time.thread_time()
            prepare(Operation.PUT)
            prepare(Operation.GET)
            seconds.append((time.thread_time() - began) / 2)
        client._store = real  # noqa: SLF001 - a benchmark looks inside
    return statistics.median(seconds)


def sglang_preparation_s() -> float | None:
    """Return the same of SGLang's own store, or None where there is none."""
    python = os.environ.get("KVDOCK_SGLANG_PYTHON")
    if not python:
        print("KVDOCK_SGLANG_PYTHON is not set: no comparison with SGLang")
        return None
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        # -P: a script beside it is named like the package that it imports.
        [python, "-P", str(PREPARE)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
        timeout=300,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["set"] + found["get"]) / 2


def main() -> None:
    """Run everything once and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # Beside this script, its own name would be taken for the library's.
    sys.path.remove(str(Path(__file__).parent))
    load()
    master = start_master("-default_kv_lease_ttl=100")
    owner = None
    pool = flat_pool("kv", PAGE_BYTES)
    own = {"master": master.address, "segment_bytes": "512 MiB"}
    others: dict[str, object] = {"master": master.address, "segment_bytes": 0}
    try:
        with attached([pool], BATCH, dict(own)) as one:
            figures: dict[str, Any] = race(one, rounds)
        with attached([pool], BATCH, dict(own), Integrity.AUTO) as one:
            checked = race(one, rounds)
        with attached([flat_pool("kv", 4096)], BATCH, dict(own)) as one:
            figures["exists_1024_ms"] = lookup_ms(one, rounds)
        owner = start_owner(master.address, 512 << 20)
        with attached([pool], BATCH, others) as one:
            remote = race(one, max(5, rounds // 3))
        figures |= {f"checked_{name}": checked[name] for name in CHECKED}
        figures |= {f"two_processes_{name}": value for name, value in remote.items()}
        figures["prepare_us"] = 1e6 * preparation_s(others, rounds)
    finally:
        if owner is not None:
            owner.stop()
        master.stop()
    theirs = sglang_preparation_s()
    figures["sglang_prepare_us"] = theirs and 1e6 * theirs
    figures["prepare_speedup_vs_sglang"] = (
        theirs and 1e6 * theirs / figures["prepare_us"]
    )
    figures = {k: v if v is None else round(v, 3) for k, v in figures.items()}
    print(json.dumps(figures, indent=2))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps({"machine": describe(), "figures": figures}, indent=2) + "\n"
    )
    named = ("put_vs_raw", "get_vs_raw", "prepare_speedup_vs_sglang", "exists_1024_ms")
    print(json.dumps({name: figures[name] for name in named}))


if __name__ == "__main__":
    main()
