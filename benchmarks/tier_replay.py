"""Replay a load over memory, disk and a slow far tier, beside what bounds it.

Usage: python benchmarks/tier_replay.py [--trace FILE] [--requests N] [--full]
                                          [--dir DIR]

Each request is a prefix of blocks of 4 KiB: it is looked up, what is there is loaded,
and the rest is stored, through an `Attachment` over three instances of the file
backend: memory, disk and far, with room for 2, 10 and 100 % of the load's different
blocks.
The far one moves 200 MB/s and takes 5 ms more for each batch. Beside the chain stand

- a simulation with the same sizes and rules (`kvdock simulate`), for the hits;
- the far tier alone, for the time of all loads;
- an oracle: the same pages are loaded once more in the same public call, each straight
  from the tier that had it, in turns before and after the chain;
- near hits while the far tier answers, and while it hangs and its breaker is open.

By default the first requests are replayed, over tiers of the size that the whole load
has: with tiers of a sample's size, the nearest would be smaller than a request.
`--full` replays all of them. Traces are as in
`kvdock simulate`. The ratios are compared with their goals; the last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from eviction import SHARED_MEMORY
from eviction_loads import GENERATED

from kvdock import (
    Attachment,
    Backend,
    Batch,
    BatchResult,
    Dock,
    Namespace,
    Operation,
    Outcome,
    PoolSpec,
    Region,
    Shard,
    hookimpl,
)
from kvdock.config import CoreSettings, Deadlines, read_tiers
from kvdock.events import BatchEnded, PagesCopied
from kvdock.plugin import PoolStore, StoreWrapper, wrapped_plugin
from kvdock.pools import Part
from kvdock_cli.simulation.hosts import Hosts, serve
from kvdock_cli.simulation.traces import Trace, read_trace

if TYPE_CHECKING:
    from kvdock import AttachConfig, Manifest
    from kvdock.plugin import InnerStore

TIERS = ("memory", "disk", "far")
SHARES = (0.02, 0.1, 1.0)
SAMPLE_REQUESTS = 1000
PAGE_BYTES = 4096
FAR_BYTES_S = 200e6
FAR_S = 0.005
NEAR_TURNS = 300
RECORD_BYTES = 72
"""What the index file of a segment has for each page."""
HEADER_BYTES = 128
SEGMENTS = 12
LEAST_PAGES = 16 * SEGMENTS
"""Room of the smallest store, in segments of 64 KiB."""
GOALS = {
    "hits_of_simulation": (">=", 0.98),
    "load_time_of_far_alone": ("<=", 0.5),
    "load_time_of_oracle": ("<=", 1.05),
    "near_time_beside_hanging_far": ("<=", 1.05),
}


class Throttle:
    """A wrapper that makes a store slow, or lets it hang."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._free_s = 0.0

    def manifest(self, inner: Manifest) -> Manifest:
        """Declare what the store declares."""
        return inner

    def wrap(
        self,
        inner: InnerStore,
        pool: PoolSpec,
        region: Region,
        config: AttachConfig,
    ) -> PoolStore:
        """Make the store of one pool slow."""
        del pool, config
        return _Slow(inner.open(region), self)

    def wait(self, nbytes: int, began_s: float) -> None:
        """Wait until a batch would have come from afar."""
        with self._lock:
            self._free_s = max(began_s, self._free_s) + nbytes / FAR_BYTES_S
            end_s = self._free_s + FAR_S
        time.sleep(max(0.0, end_s - time.monotonic()))


class _Slow(StoreWrapper):
    def __init__(self, inner: PoolStore, throttle: Throttle) -> None:
        super().__init__(inner)
        self._throttle = throttle

    def run(self, batch: Batch) -> BatchResult:
        """Do one batch, late."""
        if self._throttle.hangs.is_set():
            self._throttle.released.wait()
        began_s = time.monotonic()
        result = self.inner.run(batch)
        moves = batch.operation in (Operation.PUT, Operation.GET)
        nbytes = int(batch.object_bytes[result.ok].sum()) if moves else 0
        self._throttle.wait(nbytes, began_s)
        return result


class Counts:
    """An observer that counts pages by tier."""

    def __init__(self) -> None:
        self.loaded: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.paused = False

    @hookimpl
    def kvdock_observe(self, event: object) -> None:
        """Count what was loaded and copied."""
        if isinstance(event, BatchEnded) and event.operation is Operation.GET:
            if self.paused:  # a load of the oracle
                return
            self.loaded[event.backend] += event.nbytes // PAGE_BYTES
        elif isinstance(event, PagesCopied):
            self.copied[event.target] += event.outcomes.get("copied", 0)
            way = f"{event.source} to {event.target}"
            for outcome, pages in event.outcomes.items():
                self.copies[f"{way}: {outcome}"] += pages


def settings_of(
    roots: Mapping[str, Path], capacities: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    """Return the settings of file stores with room for just so many pages each."""
    found: dict[str, dict[str, object]] = {}
    for name, root in roots.items():
        pages = capacities[name]
        segment_bytes = min(pages // SEGMENTS * PAGE_BYTES, 4 << 20)
        headers = -(-pages * PAGE_BYTES // segment_bytes) * HEADER_BYTES
        found[name] = {
            "plugin": "file",
            "root": str(root),
            "quota": pages * (PAGE_BYTES + RECORD_BYTES) + headers,
            "segment_bytes": segment_bytes,
            "free_space": 0,
            "direct": False,
        }
    return found


@contextmanager
def attached(
    settings: Mapping[str, Mapping[str, object]],
    longest: int,
    counts: Counts,
    throttle: Throttle | None = None,
    deadline_s: float = 600.0,
    memory: npt.NDArray[np.uint8] | None = None,
) -> Iterator[Attachment]:
    """Attach one pool over tiers, near first.

    Args:
        settings: Those of each tier, by name.
        longest: Pages of memory.
        counts: Is told what happens.
        throttle: Around the tier "far", where it is given.
        deadline_s: Of each call: what a busy machine delays is not a miss.
        memory: The engine's, with a row for each page; without it some is made.
    """
    dock = Dock.load(only=[*settings], settings=settings, environ={})
    backends = dict(dock.backends)
    if throttle is not None:
        plugin = wrapped_plugin(backends["far"].plugin, [("throttle", throttle)])
        backends["far"] = Backend(plugin)
    dock = Dock(backends)
    dock.add_observer("counts", counts)
    pool = PoolSpec(
        name="kv",
        kind="k_only",
        parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0],
        page_tokens=16,
        anchor=True,
    )
    if memory is None:
        memory = np.ones((longest, PAGE_BYTES), np.uint8)
    plan = dock.plan([pool], Shard(), tiers=[*settings], settings=settings)
    regions = {"kv": Region.of(pool, Shard(), [memory], longest)}
    core = CoreSettings(
        deadlines=Deadlines(exists=deadline_s, get=deadline_s, put=deadline_s),
        tiers=attrs.evolve(CoreSettings().tiers, lookup=min(5.0, deadline_s)),
    )
    with Attachment.open(
        dock, plan, Namespace(model="m"), regions, settings, core=core
    ) as cache:
        yield cache


@attrs.define
class Times:
    """Seconds of all loads, and blocks that were loaded.

    Args:
        loaded: Blocks.
        lookups_s: Of the lookups.
        loads_s: Of the loads.
        oracle_s: Of loads that know where each page is.
    """

    loaded: int = 0
    lookups_s: float = 0.0
    loads_s: float = 0.0
    oracle_s: float = 0.0


def replay(
    load: Trace, cache: Attachment, label: str, counts: Counts, *, oracle: bool
) -> Times:
    """Replay a load; copies are made before the next request.

    Args:
        load: The requests.
        cache: Where to.
        label: What progress is reported under.
        counts: Does not count what the oracle loads.
        oracle: Whether to load each prefix once more, from where each page is.
    """
    times, pages = Times(), np.arange(max(map(len, load.requests)))
    for number, request in enumerate(load.requests):
        hashes = [f"{block:016x}" for block in request.tolist()]
        began_s = time.perf_counter()
        best = cache.exists(hashes).best
        times.lookups_s += time.perf_counter() - began_s
        names, own = hashes[:best], pages[:best]
        where = _tier_of_each(cache, names) if oracle and best else None
        if where is not None and number % 2:
            counts.paused = True
            times.oracle_s += _load_from(cache, names, own, where)
            counts.paused = False
        if best:
            began_s = time.perf_counter()
            best = cache.get(names, {"kv": own}).pages
            times.loads_s += time.perf_counter() - began_s
        cache.wait_idle(600)
        if where is not None and not number % 2:
            counts.paused = True
            times.oracle_s += _load_from(cache, names, own, where)
            counts.paused = False
        times.loaded += best
        if best < len(hashes):
            rest = pages[best : len(hashes)]
            cache.put(hashes[best:], {"kv": rest})
            cache.wait_idle(600)
        if not number % 10:
            share = (number + 1) / len(load.requests)
            print(f"\r{label} {share:6.1%} ", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    return times


def _tier_of_each(cache: Attachment, names: Sequence[str]) -> npt.NDArray[np.int64]:
    where = np.full(len(names), -1)
    for at, tier in enumerate(cache["kv"].placements):
        rest = np.flatnonzero(where < 0)
        if len(rest):
            until_s = time.monotonic() + 600
            found = tier.find([names[one] for one in rest.tolist()], until_s)
            where[rest[found]] = at
    return where


@attrs.frozen(eq=False)
class Oracle:
    """Stands in for a chain, and knows where each page is.

    Args:
        where: The tier of each page, int64 (n,); -1 for none.
    """

    where: npt.NDArray[np.int64]

    def load(
        self,
        hashes: Sequence[str],
        pages: npt.NDArray[np.int64],
        deadline_s: float,
        engine: Any,  # noqa: ANN401 - what a chain is given
    ) -> npt.NDArray[np.uint8]:
        """Load each page from its tier, straight into the engine's memory."""
        outcomes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
        for at in np.unique(self.where[self.where >= 0]).tolist():
            mine = np.flatnonzero(self.where == at)
            names = [hashes[one] for one in mine.tolist()]
            outcomes[mine] = engine.move(
                at, Operation.GET, names, pages[mine], deadline_s
            )
        return outcomes


def _load_from(
    cache: Attachment,
    names: Sequence[str],
    pages: npt.NDArray[np.int64],
    where: npt.NDArray[np.int64],
) -> float:
    """Load each page from one tier in the same public call; return the seconds."""
    pool = cache["kv"]
    chain = pool._chain  # noqa: SLF001 - what the oracle stands in for
    object.__setattr__(pool, "_chain", Oracle(where))
    try:
        began_s = time.perf_counter()
        cache.get(names, {"kv": pages})
        return time.perf_counter() - began_s
    finally:
        object.__setattr__(pool, "_chain", chain)


def near_times(
    settings: Mapping[str, Mapping[str, Mapping[str, object]]],
) -> tuple[float, float]:
    """Return the time of near hits beside a far tier that answers, and that hangs.

    Two chains take turns, so that other work on the machine meets both.

    Args:
        settings: Those of the tiers of the chain "answers", and of "hangs".
    """
    names = [f"{block:016x}" for block in range(1 << 40, (1 << 40) + 64)]
    pages = np.arange(len(names))
    throttles = {name: Throttle() for name in settings}
    taken: dict[str, list[float]] = {name: [] for name in settings}
    with ExitStack() as stack:
        caches = {}
        for name, own in settings.items():
            chain = attached(own, len(names), Counts(), throttles[name], 2.0)
            caches[name] = stack.enter_context(chain)
            caches[name].put(names, {"kv": pages})
            caches[name].wait_idle(600)
        hanging = throttles["hangs"]
        stack.callback(hanging.released.set)
        stack.callback(hanging.hangs.clear)
        hanging.hangs.set()
        while caches["hangs"].breakers()["far"][Operation.EXISTS] != "open":
            caches["hangs"].exists([*names, "f" * 16])
        for turn in range(NEAR_TURNS):
            for name in list(caches)[:: 1 if turn % 2 else -1]:
                began_s = time.perf_counter()
                found = caches[name].exists(names).best
                loaded = caches[name].get(names, {"kv": pages}).pages
                taken[name].append(time.perf_counter() - began_s)
                if (found, loaded) != (len(names), len(names)):
                    raise SystemExit("a near page was not loaded")
    # The quicker ones: other work on the machine only adds. The first ones warm up.
    quartiles = {
        name: statistics.quantiles(one[NEAR_TURNS // 10 :])[0]
        for name, one in taken.items()
    }
    return quartiles["answers"], quartiles["hangs"]


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; else generated")
    parser.add_argument("--full", action="store_true", help="all of the load")
    parser.add_argument("--requests", type=int, default=SAMPLE_REQUESTS)
    parser.add_argument("--dir", type=Path, default=None, help="of disk and far")
    args = parser.parse_args()
    load = read_trace(args.trace) if args.trace else GENERATED["conversations"](6000)
    if not args.full:
        load = attrs.evolve(load, requests=load.requests[: args.requests])
    longest = max(map(len, load.requests))
    rooms = [max(LEAST_PAGES, int(share * load.unique) + 1) for share in SHARES]
    capacities = dict(zip(TIERS, rooms, strict=True))
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    counts, alone = Counts(), Counts()
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-tiers-", dir=shared) as near,
        tempfile.TemporaryDirectory(prefix="kvdock-tiers-", dir=args.dir) as folder,
    ):
        roots = {name: Path(folder) / name for name in TIERS}
        roots["memory"] = Path(near) / "memory"
        settings = settings_of(roots, capacities)
        with attached(settings, longest, counts, Throttle()) as cache:
            chain = replay(load, cache, "chain", counts, oracle=True)
        loaded = {name: counts.loaded[name] for name in TIERS}
        only = settings_of({"far": Path(folder) / "alone"}, capacities)
        with attached(only, longest, alone, Throttle()) as cache:
            far = replay(load, cache, "far alone", alone, oracle=False)
        small = dict.fromkeys(TIERS, LEAST_PAGES)
        normal_s, hanging_s = near_times(
            {
                one: settings_of(
                    {name: Path(near) / one / name for name in TIERS}, small
                )
                for one in ("answers", "hangs")
            }
        )
    tiers = read_tiers([*TIERS])
    model = serve(load, Hosts(tiers, [*capacities.values()], load.unique))
    ratios = {
        "hits_of_simulation": chain.loaded / max(1, model.asked - model.computed),
        "load_time_of_far_alone": chain.loads_s / far.loads_s,
        "load_time_of_oracle": chain.loads_s / chain.oracle_s,
        "near_time_beside_hanging_far": hanging_s / normal_s,
    }
    print(f"{load.name}: {len(load.requests)} requests, {load.blocks} blocks")
    for name, moved in zip(TIERS, model.moved, strict=True):
        print(
            f"{name:7s} loaded {loaded[name]:8d} (simulated {moved.loaded:8d})  "
            f"copied to it {counts.copied[name]:8d}"
        )
    for name, value in ratios.items():
        sign, goal = GOALS[name]
        met = value >= goal if sign == ">=" else value <= goal
        print(
            f"{name:30s} {value:6.3f}  goal {sign} {goal}  {'met' if met else 'MISSED'}"
        )
    result = {
        "load": load.name,
        "requests": len(load.requests),
        "full": args.full,
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "loaded": loaded,
        "simulated": dict(zip(TIERS, [one.loaded for one in model.moved], strict=True)),
        "copies": dict(counts.copies),
        "seconds": attrs.asdict(chain) | {"far_alone_s": far.loads_s},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
