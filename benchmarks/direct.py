"""Measure direct transfers between two processes, for each backend.

Usage: python benchmarks/direct.py [--rounds N] [--backend NAME]

16 pages of 64 tokens and 8 layers of 1152 bytes go from a page-first pool to token
slots of a layer-first one. Within a round the ways take turns, in an order of its
own: what kvdock does (rows joined, or whole pages to a landing area and a copy at
the receiver, as the manifest's threshold says), a descriptor per token, whole pages
without a copy, and the library's own calls with ready-made lists for the rows that
kvdock sends. A ratio is the median over the rounds. All bytes are compared once per
way. The last line is a JSON object, which with more figures is also written to
benchmarks/results/direct.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock import (
    Batch,
    Block,
    DType,
    Layout,
    Manifest,
    Part,
    PoolKind,
    PoolSpec,
    Region,
    Shard,
)

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array

TESTS = Path(__file__).parent.parent
HERE = str(Path(__file__).parent)
HARNESSES = [
    str(TESTS / "tests" / "harness"),
    str(TESTS / "core" / "tests" / "harness"),
]
# Beside this file lies a `mooncake.py`, which is not the library; and processes that
# are spawned import this file again, with the path that is left here.
sys.path = [*HARNESSES, *(one for one in sys.path if one not in (HERE, *HARNESSES))]

from direct_peers import (  # noqa: E402
    Grid,
    PeerProcess,
    Rows,
    Side,
    address,
    coalesce,
    mapped,
    match,
    memory_file,
    packed,
)
from direct_trials import Remote, settings_of  # noqa: E402
from peers import slots_for  # noqa: E402

LAYERS, TOKENS, ROW, PAGES = 8, 64, 1152, 16
SENT = PAGES * LAYERS * TOKENS * ROW
SLOTS = 2 * PAGES * TOKENS
TARGET = LAYERS * SLOTS * ROW
KINDS = ("contiguous", "runs", "scattered")
BACKENDS: dict[str, dict[str, object]] = {
    "mooncake": {"host": "127.0.0.1"},
    "nixl": {"root": "/nowhere"},
}
RESULT = Path(__file__).parent / "results" / "direct.json"
SHORT_REQUESTS = 40
WARM_ROUNDS = 1

Seconds = dict[str, list[float]]


def grid_of(
    base: int, nbytes: int, page_tokens: int, layout: Layout, pages: int
) -> Grid:
    """Return the grid of an MLA pool that lies at an address."""
    pool = PoolSpec(
        name="kv",
        kind=PoolKind.MLA,
        parts=[Part("kv", DType.U8, (ROW,))],
        layers=range(LAYERS),
        page_tokens=page_tokens,
        layout=layout,
        anchor=True,
    )
    grid = Region.of(pool, Shard(), [Block(base, nbytes)], pages).grid
    if grid is None:
        raise SystemExit("the pool has no grid")
    return grid


def cut(rows: Rows, most: int) -> Rows:
    """Cut rows into pieces of so many bytes."""
    count = rows.sizes // most
    first = np.repeat(np.cumsum(count) - count, count)
    at = (np.arange(int(count.sum())) - first) * most
    local, remote = np.repeat(rows.local, count), np.repeat(rows.remote, count)
    return Rows(local + at, remote + at, np.full(len(at), most), rows.count)


def mooncake_call(side: Side, rows: Rows) -> Callable[[], None]:
    """Return the library's own calls with lists that are ready."""
    table = [one.tolist() for one in (rows.local, rows.remote, rows.sizes)]
    parts = [
        [one[start : start + 512] for one in table]
        for start in range(0, len(rows), 512)
    ]
    peer: Any = side.peers[0]
    write = peer.engine._raw.batch_transfer_sync_write  # noqa: SLF001 - measured alone

    def call() -> None:
        for part in parts:
            if write(peer.endpoint.address, *part):
                raise SystemExit("the library failed")

    return call


def nixl_call(side: Side, rows: Rows) -> Callable[[], None]:
    """Return the library's own calls with lists that are ready."""
    peer: Any = side.peers[0]
    agent, _ = peer.remote.connection(time.monotonic() + 9.0)
    raw, native, backend = agent._raw, agent._native, [agent._backend]  # noqa: SLF001 - same
    lists = []
    for places in (rows.local, rows.remote):
        table = np.zeros((len(rows), 3), np.uint64)
        table[:, 0], table[:, 1] = places, rows.sizes
        lists.append(native.nixlXferDList(native.DRAM_SEG, table))

    def call() -> None:
        name = peer.remote.name
        handle = raw.createXferReq(native.NIXL_WRITE, *lists, name, b"", backend)
        state = raw.postXferReq(handle, b"")
        while state == native.NIXL_IN_PROG:
            state = raw.getXferStatus(handle)
        raw.releaseXferReq(handle)

    return call


CALLS = {"mooncake": mooncake_call, "nixl": nixl_call}


@attrs.define(eq=False)
class Bench:
    """A sender in this process, and a receiver in another one.

    Args:
        backend: Its name.
        side: The sender.
        receiver: The other process.
        base: Where the receiver's memory begins there.
    """

    backend: str
    side: Side
    receiver: PeerProcess
    base: int
    manifest: Manifest = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Ask for the manifest once, as the core does."""
        self.manifest = self.side.plugin.kvdock_manifest()

    def send(self, rows: Rows) -> None:
        """Send rows in batches, as the core does."""
        most = self.manifest.max_send_rows
        until = time.monotonic() + 60.0
        for start in range(0, len(rows), most):
            part = slice(start, start + most)
            batch = Batch.send(
                rows.local[part],
                rows.remote[part],
                rows.sizes[part],
                self.side.peers[0],
                until,
                "kv",
            )
            result = self.side.plugin.kvdock_batch_io(self.side.handle, batch)
            if result.outcomes.any():
                raise SystemExit(f"rows were lost: {set(result.outcomes.tolist())}")

    def ways(self, slots: Int64Array) -> dict[str, Callable[[], float]]:
        """Return what takes turns; each returns its seconds."""
        mine = grid_of(
            address(self.side.memory), SENT, TOKENS, Layout.PAGE_FIRST_DIRECT, PAGES
        )
        theirs = grid_of(self.base, TARGET, 1, Layout.LAYER_FIRST, SLOTS)
        pages = np.arange(PAGES)
        landing = packed(mine, theirs, self.base + TARGET, PAGES)
        whole = np.arange(PAGES * TOKENS)
        direct = coalesce(match(mine, theirs, pages, slots))
        lands = direct.nbytes / len(direct) < self.manifest.landing_run_bytes
        to_pages = coalesce(match(mine, landing, pages, whole))
        # The receiver knows its slots and its landing area: it builds these itself.
        scatter = coalesce(match(landing, theirs, pages, slots))
        source, target = scatter.local - self.base, scatter.remote - self.base

        def scattered() -> float:
            return float(self.receiver.call("copy", source, target, scatter.sizes))

        def timed(step: Callable[[], object], *, lands: bool) -> float:
            began = time.perf_counter()
            step()
            took = time.perf_counter() - began
            return took + scattered() if lands else took

        def kvdock() -> None:
            rows = coalesce(match(mine, theirs, pages, slots))
            if lands:
                rows = coalesce(match(mine, landing, pages, whole))
            self.send(rows)

        def page_rows() -> None:
            self.send(cut(to_pages, LAYERS * TOKENS * ROW))

        tokens = cut(direct, ROW)
        sent = to_pages if lands else direct
        raw = CALLS[self.backend](self.side, sent)
        return {
            "kvdock": lambda: timed(kvdock, lands=lands),
            "tokens": lambda: timed(lambda: self.send(tokens), lands=False),
            "pages": lambda: timed(page_rows, lands=False),
            "raw": lambda: timed(raw, lands=lands),
            "rows": lambda: timed(lambda: self.send(direct), lands=False),
            "landed": lambda: timed(lambda: self.send(to_pages), lands=True),
        }

    def check(self, slots: Int64Array) -> None:
        """Compare what lies in the slots with what was sent."""
        sent = self.side.memory.reshape(PAGES, LAYERS, TOKENS, ROW)
        found = self.receiver.memory[:TARGET].reshape(LAYERS, SLOTS, ROW)[:, slots]
        if not np.array_equal(np.moveaxis(sent, 1, 0).reshape(found.shape), found):
            raise SystemExit("wrong bytes arrived")

    def race(
        self, slots: Int64Array, rounds: int, names: tuple[str, ...] = ()
    ) -> Seconds:
        """Let the ways take turns; return way to seconds."""
        ways = self.ways(slots)
        seconds: Seconds = {}
        for turn in range(rounds + WARM_ROUNDS):
            for name in np.random.default_rng(turn).permutation([*ways]).tolist():
                if names and name not in names:
                    continue
                if turn < WARM_ROUNDS:
                    self.receiver.call("set", 0)
                took = ways[name]()
                if turn < WARM_ROUNDS:
                    if name != "pages":
                        self.check(slots)
                else:
                    seconds.setdefault(name, []).append(took)
        return seconds


def ratio(seconds: Seconds, theirs: str) -> float:
    """Return how many times faster kvdock is than another way."""
    rounds = zip(seconds[theirs], seconds["kvdock"], strict=True)
    return round(statistics.median(a / b for a, b in rounds), 3)


def threshold(bench: Bench, rounds: int) -> dict[str, float]:
    """Return rows' time over the landing area's, by length of runs in bytes."""
    found = {}
    for run in (1, 2, 4, 8, 16, 32, 64):
        starts = np.random.default_rng(run).permutation(SLOTS // run)
        starts = starts[: PAGES * TOKENS // run] * run
        slots = (starts[:, None] + np.arange(run)).ravel()
        seconds = bench.race(slots, rounds, ("rows", "landed"))
        both = zip(seconds["rows"], seconds["landed"], strict=True)
        found[str(run * ROW)] = round(statistics.median(a / b for a, b in both), 2)
    return found


def short_request(backend: str) -> dict[str, float]:
    """Return milliseconds of a request of one page of two pools."""
    with settings_of(backend) as given:
        sides = [Remote(backend, given) for _ in range(2)]
        sends, whole = [], []
        try:
            for side in sides:
                side.call("open", ("mha", 16, [str(Layout.PAGE_FIRST_DIRECT)]), 1, True)
            sender, receiver = sides
            offers = receiver.call("offers", receives=True)[0]
            senders = sender.call("offers", receives=False)
            sender.call("fill", (16, 1), {"kv": [0], "draft": [0]})
            for number in range(SHORT_REQUESTS):
                began = time.perf_counter()
                slots = {"kv": np.arange(16)}
                ticket = receiver.call("expect", 0, number, slots, senders)[0]
                pages = {"kv": [0]}
                done = sender.call("send", 0, offers, ticket, pages, stop=False)
                if receiver.call("arrived", 0, number, [done]) != "arrived":
                    raise SystemExit("a request was lost")
                whole.append(time.perf_counter() - began)
                sends.append(sender.call("seconds"))
        finally:
            for side in sides:
                side.process.kill()
    return {
        "short_send_ms": round(1e3 * statistics.median(sends[5:]), 2),
        "short_request_ms": round(1e3 * statistics.median(whole[5:]), 2),
    }


def measure(backend: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ratios of a backend, and all figures."""
    given = BACKENDS[backend]
    with (
        memory_file(SENT) as mine,
        memory_file(TARGET + SENT) as theirs,
        PeerProcess(backend, theirs, given) as receiver,
    ):
        side = Side(backend, mapped(mine), given)
        side.fill(1)
        endpoint, base = receiver.call("endpoint")
        side.connect(endpoint)
        bench = Bench(backend, side, receiver, base)
        ratios: dict[str, Any] = {}
        figures: dict[str, Any] = {}
        for kind in KINDS:
            slots = slots_for(kind, PAGES * TOKENS, SLOTS, np.random.default_rng(2))
            seconds = bench.race(slots, rounds)
            for way, took in seconds.items():
                speed = SENT / 1e9 / statistics.median(took)
                figures[f"{kind}_{way}_gb_s"] = round(speed, 3)
            for way in ("tokens", "pages", "raw"):
                ratios[f"{kind}_vs_{way}"] = ratio(seconds, way)
        figures["rows_over_landed"] = threshold(bench, max(3, rounds // 2))
        figures["landing_run_bytes"] = bench.manifest.landing_run_bytes
        side.release()
    ratios |= short_request(backend)
    return ratios, {**ratios, **figures}


def main() -> None:
    """Run everything once and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", choices=[*BACKENDS], default=None)
    given = parser.parse_args()
    names = [given.backend] if given.backend else [*BACKENDS]
    ratios, figures = {}, {}
    for name in names:
        ratios[name], figures[name] = measure(name, given.rounds)
        for key, value in figures[name].items():
            print(f"{name} {key}: {value}", flush=True)
    if not given.backend:
        sys.path.append(HERE)
        from machine import describe  # noqa: PLC0415 - see `HERE`

        found = {"machine": describe(), "figures": figures}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(ratios) + "\n")


if __name__ == "__main__":
    main()
