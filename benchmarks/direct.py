"""Measure transfers to peers, between two processes, for each backend.

Usage: python benchmarks/direct.py [--rounds N] [--backend NAME]

16 pages of 64 tokens and 8 layers of 1152 bytes go from a page-first pool to token
slots of a layer-first one. Within a round the ways take turns, in an order of its
own: what kvdock does (rows joined, or whole pages to a landing area and a copy at
the receiver, as the manifest's threshold says), a descriptor per token, whole pages
without a copy, and the library's own calls with ready-made lists for the rows that
kvdock sends. A ratio is the median over the rounds. All bytes are compared once per
way.

Then whole requests, as an engine makes them: `expect` at the receiver, its ticket over
a pipe, `send`, the completion over the pipe, `complete`, with and without verification;
beside them the library's own calls for the same rows, with two messages over the same
pipe and the receiver's copy where pages land first. Figures named `fast` are of the
fastest tenth of the rounds, which other work on the machine disturbs least.

The last line is a JSON object, which with more figures is also written to
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
    Attachment,
    Batch,
    Block,
    Dock,
    DType,
    Layout,
    Manifest,
    Namespace,
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.geometry.matching import move
from kvdock.peers import PeerTransfers
from kvdock.pools import Part

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray, Int64Array
    from kvdock.peers import Offer
    from kvdock.peers.connections import Peer
    from kvdock_mooncake.peers import EngineConnection
    from kvdock_nixl.peers import AgentConnection

TESTS = Path(__file__).parent.parent
HERE = str(Path(__file__).parent)
HARNESSES = [
    str(TESTS / "tests" / "harness"),
    str(TESTS / "core" / "tests" / "harness"),
]
# Beside this file lies a `mooncake.py`, which is not the library; and processes that
# are spawned import this file again, with the path that is left here.
sys.path = [*HARNESSES, *(one for one in sys.path if one not in (HERE, *HARNESSES))]

from peer_processes import (  # noqa: E402
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
from peer_trials import Remote, settings_of  # noqa: E402
from peers import settings, slots_for  # noqa: E402

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
REQUEST = 16 << 20
RACES = (("raw", "verified"), ("raw", "unverified"), ("unverified", "verified"))
"""What is compared: the time of the first one over that of the second."""
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


def mooncake_call(peer: Peer[EngineConnection], rows: Rows) -> Callable[[], None]:
    """Return the library's own calls with lists that are ready."""
    table = [one.tolist() for one in (rows.local, rows.remote, rows.sizes)]
    parts = [
        [one[start : start + 512] for one in table]
        for start in range(0, len(rows), 512)
    ]
    connection = peer.connection
    if connection.link is None:
        raise SystemExit("the peer is lost")
    write = connection.link._raw.batch_transfer_sync_write  # noqa: SLF001 - measured alone

    def call() -> None:
        for part in parts:
            if write(connection.peer, *part):
                raise SystemExit("the library failed")

    return call


def nixl_call(peer: Peer[AgentConnection], rows: Rows) -> Callable[[], None]:
    """Return the library's own calls with lists that are ready."""
    agent = peer.connection.open_link(time.monotonic() + 9.0)
    if agent is None:
        raise SystemExit("the peer is lost")
    raw, native, backend = agent._raw, agent._native, [agent._backend]  # noqa: SLF001 - same
    lists = []
    for places in (rows.local, rows.remote):
        table = np.zeros((len(rows), 3), np.uint64)
        table[:, 0], table[:, 1] = places, rows.sizes
        lists.append(native.nixlXferDList(native.DRAM_SEG, table))

    def call() -> None:
        name = peer.connection.peer
        handle = raw.createXferReq(native.NIXL_WRITE, *lists, name, b"", backend)
        state = raw.postXferReq(handle, b"")
        while state == native.NIXL_IN_PROG:
            state = raw.getXferStatus(handle)
        raw.releaseXferReq(handle)

    return call


CALLS: dict[str, Callable[[Any, Rows], Callable[[], None]]] = {
    "mooncake": mooncake_call,
    "nixl": nixl_call,
}


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
            result = self.side.handle.peers.send(batch)
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
        raw = CALLS[self.backend](self.side.peers[0], sent)
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


class Engine:
    """One side of whole requests: an attachment with one pool over shared memory.

    Args:
        backend: Its name.
        memory: The pool's memory.
        given: Settings of the backend.
    """

    def __init__(
        self, backend: str, memory: ByteArray, given: dict[str, object]
    ) -> None:
        self.backend, self.memory, self.given = backend, memory, given

    def open(self, page_bytes: int, layout: str, page_tokens: int) -> None:
        """Attach the pool; its pages of 64 tokens have so many bytes."""
        row = page_bytes // (LAYERS * TOKENS)
        pool = PoolSpec(
            name="kv",
            kind=PoolKind.MLA,
            parts=[Part("kv", DType.U8, (row,))],
            layers=range(LAYERS),
            page_tokens=page_tokens,
            layout=Layout(layout),
            anchor=True,
        )
        name = self.backend
        dock = Dock.load(require=[name], environ={"KVDOCK_PLUGINS": name})
        plan = dock.plan(
            [pool], Shard(), needs=RouteRequirements(peers=True),
            settings={name: self.given},
        )  # fmt: skip
        pages = REQUEST // (row * LAYERS * page_tokens)
        self.region = Region.of(pool, Shard(), [self.memory], pages)
        self.attachment = Attachment.open(
            dock, plan, Namespace(model="bench"), {"kv": self.region},
            core=settings(), settings={name: self.given},
        )  # fmt: skip
        self.transfers = PeerTransfers(self.attachment)

    def offers(self, *, receives: bool) -> dict[str, Offer]:
        """Return the offer of the pool."""
        return self.transfers.offers(receives=receives)

    def expect(
        self,
        slots: Int64Array,
        offers: dict[str, Offer],
        verify: bool,  # noqa: FBT001 - sent over a pipe
    ) -> bytes:
        """Lease slots; return the ticket."""
        # Both ways share an attachment, and with it its connection.
        core = self.transfers._core  # noqa: SLF001 - see above
        core = attrs.evolve(core, peers=attrs.evolve(core.peers, verify=verify))
        self.transfers._core = core  # noqa: SLF001 - see above
        self.transfers.pools["kv"].attached.channel.core = core
        self.request = self.transfers.expect({"kv": slots}, [offers])
        return self.request.tickets[0]

    def send(self, offers: dict[str, Offer], ticket: bytes, pages: Int64Array) -> bytes:
        """Send a request; return the completion."""
        future = self.transfers.send(offers, ticket, {"kv": pages})
        if not future.wait_quiet(60.0):
            raise SystemExit("a request did not end")
        return future.completion().to_bytes()

    def arrived(self, completion: bytes) -> str:
        """Take a completion; return what became of the request."""
        self.transfers.complete(completion)
        return str(self.request.state)

    def grid(self) -> Grid:
        """Return where the pool lies."""
        found = self.region.grid
        if found is None:
            raise SystemExit("the pool has no grid")
        return found

    def landing(self) -> int:
        """Return where the landing area begins; 0 for none."""
        area = self.transfers.pools["kv"].area
        return int(area.memory.ctypes.data) if area else 0

    def copy(self, rows: Rows | None) -> None:
        """Copy from the landing area to slots, as a message of the raw way."""
        if rows is not None:
            move(rows)

    def close(self) -> None:
        """End everything."""
        self.attachment.close(60.0)


def request_ways(
    sender: Engine, receiver: PeerProcess, slots: Int64Array
) -> dict[str, Callable[[], None]]:
    """Return what takes turns: verified, unverified, and the library alone."""
    theirs = receiver.call("offers", {"receives": True})
    mine = sender.offers(receives=False)
    own = np.arange(-(-len(slots) // TOKENS))

    def request(*, verify: bool) -> None:
        ticket = receiver.call("expect", slots, mine, verify)
        done = sender.send(theirs, ticket, own)
        state = receiver.call("arrived", done)
        if state != "arrived":
            raise SystemExit(f"a request was {state}")

    request(verify=True)
    (other,) = sender.transfers._sender._receivers.values()  # noqa: SLF001 - measured alone
    (peer,) = other.peers.values()
    grid, target = sender.grid(), receiver.call("grid")
    rows = coalesce(match(grid, target, own, slots))
    copied = None
    shortest = sender.transfers.pools["kv"].manifest.landing_run_bytes
    if rows.nbytes < shortest * len(rows):
        area = packed(grid, target, receiver.call("landing"), len(own))
        whole = np.arange(len(slots))
        rows = coalesce(match(grid, area, own, whole))
        copied = coalesce(match(area, target, np.arange(len(own)), slots))
    call = CALLS[sender.backend](peer.link, rows)

    def raw() -> None:
        receiver.call("copy", None)
        call()
        receiver.call("copy", copied)

    return {
        "verified": lambda: request(verify=True),
        "unverified": lambda: request(verify=False),
        "raw": raw,
    }


def whole_requests(backend: str, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ratios and figures of whole requests of 16 MiB."""
    ratios: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    first = str(Layout.PAGE_FIRST_DIRECT)
    for name, page_bytes, kind, layout, tokens in (
        ("64k", 64 << 10, "contiguous", first, TOKENS),
        ("64k", 64 << 10, "pages", first, TOKENS),
        ("1m", 1 << 20, "contiguous", first, TOKENS),
        ("1m", 1 << 20, "pages", first, TOKENS),
        ("1m", 1 << 20, "scattered", str(Layout.LAYER_FIRST), 1),
    ):
        with (
            settings_of(backend) as given,
            memory_file(REQUEST) as mine,
            memory_file(REQUEST) as theirs,
            PeerProcess(backend, theirs, given, Engine) as receiver,
        ):
            sender = Engine(backend, mapped(mine), given)
            sender.memory[:] = np.random.default_rng(3).integers(1, 256, REQUEST)
            sender.open(page_bytes, first, TOKENS)
            receiver.call("open", page_bytes, layout, tokens)
            count = REQUEST // page_bytes * TOKENS
            slots = np.arange(count)
            if kind != "contiguous":
                step = TOKENS if kind == "pages" else 1
                starts = np.random.default_rng(4).permutation(count // step) * step
                slots = (starts[:, None] + np.arange(step)).ravel()
            ways = request_ways(sender, receiver, slots)
            seconds: Seconds = {}
            for turn in range(rounds + WARM_ROUNDS):
                for way in np.random.default_rng(turn).permutation([*ways]).tolist():
                    began = time.perf_counter()
                    ways[way]()
                    took = time.perf_counter() - began
                    if turn >= WARM_ROUNDS:
                        seconds.setdefault(way, []).append(took)
            sender.close()
        label = f"request_{name}_{kind}"
        for way, times in seconds.items():
            figures[f"{label}_{way}_ms"] = round(1e3 * statistics.median(times), 2)
        for better, worse in RACES:
            both = zip(seconds[better], seconds[worse], strict=True)
            found = round(statistics.median(a / b for a, b in both), 3)
            ratios[f"{label}_{worse}_vs_{better}"] = found
            fast = [np.quantile(seconds[one], 0.1) for one in (better, worse)]
            figures[f"{label}_{worse}_vs_{better}_fast"] = round(fast[0] / fast[1], 3)
    return ratios, figures


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
    whole, more = whole_requests(backend, 3 * rounds)
    ratios |= whole
    return ratios, {**ratios, **figures, **more}


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
