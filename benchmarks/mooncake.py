"""Measure the mooncake backend against the library's own calls.

Usage: python benchmarks/mooncake.py [--rounds N]

A master and a second process that owns memory run on loopback. The library's
calls on the same buffers, with ready-made lists, and an attachment take turns
within a run; a figure is the median of the ratios within a round.
`prepare_speedup_vs_sglang` compares whole public calls for a batch of 128 pages and
4 pools with those of SGLang's own MooncakeStore, both on a store that answers at
once: `Attachment.put` and `get`, with the thread of each call, against `batch_set_v1`
and `_v2`, `batch_get_v1` and `_v2`. The sides take turns, each in its own process, and
wall time counts; a figure is a lower quartile. SGLang is in .venv-sglang, or where
TESTS_OF_KVDOCK_SGLANG_PYTHON says; without it the ratio is null. The last line is a
JSON object, which with more figures is also in benchmarks/results/mooncake.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import attrs
import numpy as np
from machine import describe, sglang_python

from kvdock import (
    Attachment,
    Dock,
    DType,
    Namespace,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, Integrity
from kvdock.pools import Part, Per
from kvdock_mooncake.library import load
from kvdock_mooncake.server import start_master, start_owner

BATCH, PAGE_BYTES = 128, 256 << 10
LOOKUP_KEYS = 1024
CHECKED = ("put_vs_raw", "get_vs_raw", "put_gb_s", "get_gb_s")
RESULT = Path(__file__).parent / "results" / "mooncake.json"
PREPARE = Path(__file__).with_name("mooncake_prepare.py")
PREPARE_ROUNDS, WARM_UP_ROUNDS = 10, 10
"""Rounds of `race_prepare` for each of the others, and how many do not count."""


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
    names = (f"{round_number}.{page}".encode() for page in range(count))
    return [hashlib.sha256(name).hexdigest() for name in names]


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


@contextmanager
def sglang_calls() -> Iterator[Callable[[str], float] | None]:
    """Lend what times a call of SGLang's own store, or None where there is none."""
    python = sglang_python()
    if not python:
        print("no comparison with SGLang: `make test-sglang` brings it")
        yield None
        return
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        # -P: a script beside it is named like the package that it imports.
        [python, "-P", str(PREPARE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        asked, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)

        def seconds_of(call: str) -> float:
            asked.write(f"{call}\n")
            asked.flush()
            answer = answers.readline()
            if not answer:
                raise SystemExit("SGLang's side of the comparison has ended")
            return float(answer)

        # SGLang prints lines of its own while it is loaded.
        while (line := answers.readline()).strip() != "ready":
            if not line:
                raise SystemExit("SGLang's side of the comparison does not start")
        yield seconds_of


def race_prepare(settings: dict[str, object], rounds: int) -> dict[str, float | None]:
    """Let whole calls of kvdock and of SGLang take turns, without moving a byte."""
    seconds: dict[str, list[float]] = {}
    with sglang_calls() as sglang, attached(two_part_pools(), BATCH, settings) as one:
        client = one.client
        real, client._store = client._store, InstantStore()  # noqa: SLF001 - a benchmark looks inside
        hashes = hashes_of(1 << 21, BATCH)
        places = {"kv": np.arange(BATCH)}
        calls = {"put": one.attachment.put, "get": one.attachment.get}

        def call(name: str) -> float:
            began = time.perf_counter()
            result = calls[name](hashes, places)
            took = time.perf_counter() - began
            if result.pages != BATCH:
                raise SystemExit(f"{name} did not succeed")
            return took

        steps = {name: (lambda name=name: call(name)) for name in calls}
        if sglang is not None:
            steps |= {
                f"sglang_{name}": (lambda name=name: sglang(name))
                for name in ("set", "get")
            }
        for turn in range(PREPARE_ROUNDS * rounds):
            names = list(steps) if turn % 2 else list(reversed(steps))
            for name in names:
                took = steps[name]()
                if turn > WARM_UP_ROUNDS:
                    seconds.setdefault(name, []).append(took)
        client._store = real  # noqa: SLF001 - a benchmark looks inside
    quick = {name: np.quantile(all_, 0.25) for name, all_ in seconds.items()}
    figures: dict[str, float | None] = {
        f"prepare_{name}_us": 1e6 * float(took) for name, took in quick.items()
    }
    ratio = None
    if sglang is not None:
        theirs = quick["sglang_set"] + quick["sglang_get"]
        ratio = float(theirs / (quick["put"] + quick["get"]))
    return figures | {"prepare_speedup_vs_sglang": ratio}


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
        figures |= race_prepare(others, rounds)
    finally:
        if owner is not None:
            owner.stop()
        master.stop()
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
