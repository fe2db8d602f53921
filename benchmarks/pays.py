"""Time to the first token over a grid of stores: loading, computing, and kvdock.

Usage: python benchmarks/pays.py [--requests N] [--quick] [--out results/pays.json]

A stand-in engine computes at a known rate (it sleeps), and loads through a real
attachment on a backend in memory, which the fault injector throttles. Each point of
the grid is asked N times after 20 requests that only learn. Beside kvdock's decisions
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
RATES = (50e6, 200e6, 1e9, 5e9)
LATENCIES_S = (0.0, 0.02, 0.2)
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


@attrs.define(eq=False)
class StandIn:
    """An engine that sleeps where another would compute, over a real attachment."""

    attachment: Attachment
    injector: Any
    requests: int = 0

    @property
    def end(self) -> int:
        """Tokens of each prompt."""
        return PAGES * PAGE_TOKENS + TAIL_TOKENS

    def compute(self, start: int) -> None:
        """Compute the rest of a prompt."""
        policy = self.attachment.pays
        for prefix, count, took_s in steps(start, self.end):
            policy.compute.begin([(prefix, count)])
            time.sleep(took_s)
            policy.compute.end()

    def load(self, count: int, limit: LoadLimit | None, end_s: float) -> int:
        """Load pages until a limit or a time; return how many are whole."""
        if not count:
            return 0
        with limited_by(limit):
            if limit is not None:
                end_s = limit.until(end_s)
            codes = self.attachment["kv"].get(NAMES[:count], np.arange(count), end_s)
        good = codes == Outcome.OK
        return count if good.all() else int(good.argmin())

    def first_token_s(self, rule: str) -> float:
        """Serve one request by a rule; return the time to its first token."""
        self.requests += 1
        began_s, name = time.monotonic(), str(self.requests)
        hard_s = began_s + HARD_S
        match rule:
            case "compute" | "best_effort":
                whole = 0
            case "wait_complete":
                whole = self.load(PAGES, None, hard_s)
            case "timeout":
                limit_s = 1.0 + 0.25 * PAGES * PAGE_TOKENS / 1024
                # No limit of ours: what is over SGLang's is only late.
                gain = np.linspace(limit_s / 1.05, 0.0, PAGES + 1)
                cut = Timeout(gain)
                whole = self.load(PAGES, cut, hard_s)
            case _:
                whole = self.decided(name, hard_s)
        self.compute(whole * PAGE_TOKENS)
        return time.monotonic() - began_s

    def decided(self, name: str, hard_s: float) -> int:
        """Load what kvdock decides."""
        curves: dict[Any, Any] = {}
        load_s = self.attachment["kv"].load_seconds(NAMES, curves)
        ends = np.arange(PAGES + 1) * PAGE_TOKENS
        ones = np.ones(PAGES + 1, np.bool_)
        policy = self.attachment.pays
        found = policy.decide(Prefix(name, ones, load_s, ends, self.end, curves))
        whole = self.load(found.pages, found.limit, hard_s)
        policy.done(name)
        return whole


NAMES = [f"{number:064x}" for number in range(PAGES)]
RULES = ("compute", "wait_complete", "timeout", "kvdock")


def opened(folder: Path) -> StandIn:
    """Attach a file store whose loads can be throttled."""
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
    memory = np.zeros((PAGES, pool.page_bytes(shard)), np.uint8)
    region = Region.of(pool, shard, [memory], PAGES)
    plan = dock.plan([pool], shard, ["file"], settings=given)
    cache = Attachment.open(
        dock, plan, Namespace(model="standin"), {"kv": region}, given, core=core
    )
    put = cache.put(NAMES, {"kv": np.arange(PAGES)})
    if put.pages != PAGES:
        sys.exit(f"only {put.pages} pages are stored")
    handle: Any = cache["kv"].handle
    return StandIn(cache, handle._injector)  # noqa: SLF001 - no setting can be changed in use


def main() -> None:
    """Print the grid."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="without latencies")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rates = RATES
    latencies = (0.0,) if given.quick else LATENCIES_S
    rows: list[dict[str, Any]] = []
    print(
        f"{'MB/s':>7} {'ms':>5} " + " ".join(f"{one:>14}" for one in RULES), "  ratio"
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(Path(folder))
        for _ in range(2):
            engine.compute(0)
        for rate in rates:
            for latency_s in latencies:
                engine.injector.inject(
                    kinds=("throttle",), operations=("get",),
                    bandwidth=int(rate), delay=latency_s,
                )  # fmt: skip
                row = measured(engine, rate, latency_s, given.requests)
                rows.append(row)
                cells = " ".join(f"{row[one] * 1e3:>11.0f} ms" for one in RULES)
                print(
                    f"{rate / 1e6:>7.0f} {latency_s * 1e3:>5.0f} {cells}"
                    f" {row['ratio']:>7.3f}",
                    flush=True,
                )
        engine.attachment.close()
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    worst = max(row["ratio"] for row in rows)
    print(f"worst median: {worst:.3f} of the better of loading and computing")
    sys.exit(worst > 1.05 + 0.05 * given.quick)


def measured(
    engine: StandIn, rate: float, latency_s: float, requests: int
) -> dict[str, Any]:
    """Return medians of one point."""
    row: dict[str, Any] = {"bytes_per_s": rate, "latency_s": latency_s}
    for _ in range(20):
        engine.first_token_s("kvdock")
    for rule in RULES:
        few = 3 if rule != "kvdock" else requests
        row[rule] = statistics.median(engine.first_token_s(rule) for _ in range(few))
    row["ratio"] = row["kvdock"] / min(row["compute"], row["wait_complete"])
    return row


if __name__ == "__main__":
    main()
