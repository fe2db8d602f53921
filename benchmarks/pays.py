"""Time to the first token over a grid of stores: loading, computing, and kvdock.

Usage: python benchmarks/pays.py [--axes plain jitter queue changes] [--requests N]
                                 [--quick] [--out results/pays.json]

A stand-in engine computes at a known rate (it sleeps), and loads through a real
attachment on a backend in memory, which the fault injector throttles. The axes:

plain    every rate with every latency;
jitter   the throttle is up to 30 % faster or slower from call to call;
queue    three other requests begin to load by the same rule just before each request;
changes  the store becomes another one at once, with its numbers for the 5 s after it.

Each point begins with a new attachment, which has computed two prompts. Its first 20
requests are reported apart; kvdock is then asked N times, and the others N / 4 times in
between. Beside kvdock's decisions
stand rules of others on the same throttle: `wait_complete` loads what was found and
waits for all of it, as vLLM's file tier does; `timeout` ends a prefetch after SGLang's
1 s and 0.25 s for each 1024 tokens and uses what is whole; `best_effort` loads for as
long as the request would have to wait anyway, which is nothing here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvdock import Attachment, Dock, Namespace, Outcome, Region, Shard
from kvdock.config import CoreSettings, structure
from kvdock.pays import LoadLimit, Prefix, limited_by
from kvdock.pools import mha

PAGES, PAGE_TOKENS = 64, 16
TAIL_TOKENS = 40
RATES = (50e6, 200e6, 1e9, 5e9, 20e9)
LATENCIES_S = (0.0, 0.005, 0.05, 0.2)
JITTER, QUEUE = 0.3, 3
LEARN, CHANGE_S = 20, 5.0
OTHERS_EVERY = 4
TOKENS_PER_S, SQUARE, STEP_S = 5_000.0, 2e-8, 0.002
STEP = 512
HARD_S = 30.0


def steps(start: int, end: int) -> list[tuple[int, int, float]]:
    """Return prefix, tokens and seconds of the steps between two tokens."""
    found = []
    while start < end:
        count = min(STEP, end - start)
        took_s = STEP_S + count / TOKENS_PER_S + SQUARE * count * (start + count / 2)
        found.append((start, count, took_s))
        start += count
    return found


def compute_s(start: int, end: int) -> float:
    """Return what computing really takes."""
    return sum(took_s for _, _, took_s in steps(start, end))


class Timeout(LoadLimit):
    """A limit that does not look at how a load goes."""

    def reached(self, done: float) -> bool:
        """Return whether to end before the time is over: never."""
        del done
        return False


@attrs.frozen(kw_only=True)
class Store:
    """A store as the throttle makes it, and how many others load from it."""

    bytes_per_s: float
    latency_s: float = 0.0
    jitter: float = 0.0
    queue: int = 0

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e6:>6.0f} MB/s {self.latency_s * 1e3:>4.0f} ms"


@attrs.define(eq=False)
class StandIn:
    """An engine that sleeps where another would compute, over a real attachment.

    The requests of the queue are those of `others`: they load, and their computing is
    left out, as if it came after the request that is measured.
    """

    attachment: Attachment
    injector: Any
    others: ThreadPoolExecutor
    queue: int = 0
    requests: int = 0

    @property
    def end(self) -> int:
        """Tokens of each prompt."""
        return PAGES * PAGE_TOKENS + TAIL_TOKENS

    def throttle(self, store: Store) -> None:
        """Make the store another one."""
        self.queue = store.queue
        self.injector.inject(
            kinds=("throttle",), operations=("get",), jitter=store.jitter,
            bandwidth=int(store.bytes_per_s), delay=store.latency_s,
        )  # fmt: skip

    def compute(self, start: int) -> None:
        """Compute the rest of a prompt."""
        policy = self.attachment.pays
        for prefix, count, took_s in steps(start, self.end):
            policy.compute.begin([(prefix, count)])
            time.sleep(took_s)
            policy.compute.end()

    def load(self, count: int, limit: LoadLimit | None, end_s: float, slot: int) -> int:
        """Load pages until a limit or a time; return how many are whole."""
        if not count:
            return 0
        where = np.arange(count) + slot * PAGES
        with limited_by(limit):
            if limit is not None:
                end_s = limit.until(end_s)
            codes = self.attachment["kv"].get(NAMES[:count], where, end_s)
        good = codes == Outcome.OK
        return count if good.all() else int(good.argmin())

    def restored(self, rule: str, slot: int = 0) -> int:
        """Load for one request by a rule; return the pages that it has."""
        hard_s = time.monotonic() + HARD_S
        match rule:
            case "compute" | "best_effort":
                return 0
            case "wait_complete":
                return self.load(PAGES, None, hard_s, slot)
            case "timeout":
                limit_s = 1.0 + 0.25 * PAGES * PAGE_TOKENS / 1024
                # No limit of ours: what is over SGLang's is only late.
                gain = np.linspace(limit_s / 1.05, 0.0, PAGES + 1)
                return self.load(PAGES, Timeout(gain), hard_s, slot)
            case _:
                return self.decided(hard_s, slot)

    def first_token_s(self, rule: str) -> float:
        """Serve one request by a rule; return the time to its first token."""
        queue = [
            self.others.submit(self.restored, rule, 1 + at) for at in range(self.queue)
        ]
        if queue:
            time.sleep(0.002)  # they come first
        began_s = time.monotonic()
        whole = self.restored(rule)
        self.compute(whole * PAGE_TOKENS)
        took_s = time.monotonic() - began_s
        for one in queue:
            one.result()
        return took_s

    def decided(self, hard_s: float, slot: int) -> int:
        """Load what kvdock decides."""
        self.requests += 1
        curves: dict[Any, Any] = {}
        name = f"{self.requests}-{slot}"
        load_s = self.attachment["kv"].load_seconds(NAMES, curves)
        ends = np.arange(PAGES + 1) * PAGE_TOKENS
        ones = np.ones(PAGES + 1, np.bool_)
        policy = self.attachment.pays
        found = policy.decide(Prefix(name, ones, load_s, ends, self.end, curves))
        whole = self.load(found.pages, found.limit, hard_s, slot)
        policy.done(name)
        return whole


NAMES = [f"{number:064x}" for number in range(PAGES)]
RULES = ("compute", "wait_complete", "timeout", "kvdock")


@contextmanager
def opened(folder: Path) -> Iterator[StandIn]:
    """Attach a file store whose loads can be throttled; store what is asked for."""
    pool = mha(
        "kv",
        anchor=True,
        page_tokens=PAGE_TOKENS,
        layers=range(16),
        heads=8,
        head_dim=128,
    )
    shard = Shard()
    given = {"file": {"root": str(folder), "free_space": "0", "wrap": ["faults"]}}
    dock = Dock.load(require=["file"], only=["file"], settings=given)
    core = structure(
        CoreSettings,
        {"calls": {"staging": "safe"}, "deadlines": {"get": "30 s", "put": "60 s"}},
        where="the benchmark",
    )
    pages = PAGES * (1 + QUEUE)
    # Filled, so that the first load does not wait for the system's memory.
    memory = np.full((pages, pool.page_bytes(shard)), 1, np.uint8)
    region = Region.of(pool, shard, [memory], pages)
    plan = dock.plan([pool], shard, ["file"], settings=given)
    cache = Attachment.open(
        dock, plan, Namespace(model="standin"), {"kv": region}, given, core=core
    )
    with cache, ThreadPoolExecutor(QUEUE) as others:
        if not cache["kv"].exists(NAMES).all():
            put = cache.put(NAMES, {"kv": np.arange(PAGES)})
            if put.pages != PAGES:
                sys.exit(f"only {put.pages} pages are stored")
        handle: Any = cache["kv"].handle
        engine = StandIn(cache, handle._injector, others)  # noqa: SLF001 - no setting can be changed in use
        for _ in range(2):
            engine.compute(0)
        yield engine


def points(axis: str, *, quick: bool) -> Iterator[Store]:
    """Yield the stores of an axis."""
    for rate in RATES:
        match axis:
            case "plain":
                for latency_s in LATENCIES_S[: 1 if quick else None]:
                    yield Store(bytes_per_s=rate, latency_s=latency_s)
            case "jitter":
                yield Store(bytes_per_s=rate, latency_s=0.005, jitter=JITTER)
            case _:
                for latency_s in (0.0, 0.05):
                    yield Store(bytes_per_s=rate, latency_s=latency_s, queue=QUEUE)


CHANGES = (
    (Store(bytes_per_s=20e9), Store(bytes_per_s=50e6)),
    (Store(bytes_per_s=50e6), Store(bytes_per_s=20e9)),
    (Store(bytes_per_s=5e9), Store(bytes_per_s=5e9, latency_s=0.5)),
    (Store(bytes_per_s=5e9, latency_s=0.5), Store(bytes_per_s=5e9)),
)


def main() -> None:
    """Print the grid."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="without latencies")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for axis in given.axes:
            cells = " ".join(f"{one:>13}" for one in RULES)
            print(f"{axis:<20}{cells}   ratio  first 20: ratio, most", flush=True)
            if axis == "changes":
                found = changed(Path(folder), given.requests)
            else:
                stores = points(axis, quick=given.quick)
                found = (measured(Path(folder), one, given.requests) for one in stores)
            for row in found:
                rows.append({"axis": axis, **row})
                print(line(row), flush=True)
    if given.out:
        kept = json.loads(given.out.read_text()) if given.out.exists() else []
        kept = [row for row in kept if row.get("axis") not in given.axes]
        given.out.write_text(json.dumps(kept + rows, indent=1) + "\n")
    worst = max(row["ratio"] for row in rows)
    first = max(row["first_ratio"] for row in rows)
    print(f"worst median: {worst:.3f} of the better of loading and computing;")
    print(f"of the first 20, or of the 5 s after a change: {first:.3f}")
    sys.exit(worst > 1.05 + 0.05 * given.quick or first > FIRST_RATIO)


AXES = ("plain", "jitter", "queue", "changes")
FIRST_RATIO = 1.3


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    cells = " ".join(f"{row[one] * 1e3:>10.0f} ms" for one in RULES)
    point = Store(bytes_per_s=row["bytes_per_s"], latency_s=row["latency_s"])
    return (
        f"{point!s:<20}{cells} {row['ratio']:>7.3f}"
        f" {row['first_ratio']:>16.3f} {row['first_most']:>5.2f}"
    )


def measured(folder: Path, store: Store, requests: int) -> dict[str, Any]:
    """Return medians of one point."""
    with opened(folder) as engine, opened(folder) as other:
        engine.throttle(store)
        first = [engine.first_token_s("kvdock") for _ in range(LEARN)]
        return compared(engine, other, store, first, requests)


def changed(folder: Path, requests: int) -> Iterator[dict[str, Any]]:
    """Yield medians after each change; those of its 5 s as `first`."""
    for before, after in CHANGES:
        with opened(folder) as engine, opened(folder) as other:
            engine.throttle(before)
            for _ in range(2 * LEARN):
                engine.first_token_s("kvdock")
            engine.throttle(after)
            first, end_s = [], time.monotonic() + CHANGE_S
            while time.monotonic() < end_s:
                first.append(engine.first_token_s("kvdock"))
            yield compared(engine, other, after, first, requests)


def compared(
    engine: StandIn, other: StandIn, store: Store, first: list[float], requests: int
) -> dict[str, Any]:
    """Return medians of each rule on one store, beside those of the first requests.

    The other engine has the other rules: kvdock learns nothing from their loads.
    """
    other.restored("wait_complete")
    other.throttle(store)
    row: dict[str, Any] = attrs.asdict(store)
    took: dict[str, list[float]] = {rule: [] for rule in RULES}
    for number in range(requests):
        for rule in RULES:
            # In turns, so that what else the machine does is the same for all.
            if rule == "kvdock":
                took[rule].append(engine.first_token_s(rule))
            elif number % OTHERS_EVERY == 0:
                took[rule].append(other.first_token_s(rule))
    row |= {rule: statistics.median(some) for rule, some in took.items()}
    best_s = min(row["compute"], row["wait_complete"])
    row["ratio"] = row["kvdock"] / best_s
    row["first_ratio"] = statistics.median(first) / best_s
    row["first_most"] = max(first) / best_s
    return row


if __name__ == "__main__":
    main()
