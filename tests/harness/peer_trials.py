"""Send requests between the ranks of two processes, and compare every byte.

Usage: python peer_trials.py BACKEND TRANSFERS [SEED [SECONDS]]

A transfer is what one rank sends to another for one request. Ends after so many
seconds if that is earlier.

Both processes attach pools of a random family, with layouts, page sizes, ranks and
slots of their own, and send requests of random lengths, some of them aborted. Between
them tickets are sent again that were used, have expired, or are of requests and
attachments that are over: none of them may be sent. What tokens hold follows from a
seed, so the receiver knows every byte that it should get. The last line is JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np
from peers import LONG_S, Content, Peer, pages_for, settings, slots_for

from kvdock import (
    Attachment,
    Dock,
    DType,
    HitPolicy,
    Layout,
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.errors import KvdockError
from kvdock.geometry.matching import match, move
from kvdock.peers import PeerTransfers, Ticket, TicketError
from kvdock.pools import Part, Per

HEADS = 4
TOKENS = 256
"""Slots of each pool."""

WINDOW = 64
"""Tokens of a sliding window."""

TICKETS_KEPT = 64
"""Tickets that are over, to be sent again."""

REQUESTS_EACH = 250
"""Requests of a pair of attachments, before others are made."""

RANKS = ((1, 1), (1, 2), (2, 1), (4, 2))
PAGES = (1, 4, 16, 64)
SLOTS = ("contiguous", "runs", "scattered")
FAMILIES = ("mha", "mla", "hybrid", "sparse")
SHARED = ("draft", "keys")
"""Pools that have the indices of the attention pool."""


def pools_of(family: str, page_tokens: int, layouts: list[str]) -> list[PoolSpec]:
    """Return the pools of a family of models."""
    keys = [Part(name, DType.BF16, (HEADS, 24), shard_axis=0) for name in "kv"]

    def pool(name: str, **given: Any) -> PoolSpec:
        common = {
            "name": name,
            "kind": PoolKind.MHA,
            "parts": keys,
            "layers": range(3),
            "page_tokens": page_tokens,
            "layout": Layout(layouts[len(name) % len(layouts)]),
        }
        return PoolSpec(**{**common, **given})

    of_draft = {
        "draft": True,
        "required": False,
        "indices_from": "kv",
        "layers": range(1),
    }
    latent = pool(
        "kv", anchor=True, kind=PoolKind.MLA, parts=[Part("kv", DType.U8, (1152,))]
    )
    if family == "mla":
        return [latent]
    if family == "sparse":
        # Pages whose tokens cannot be told apart go from page to page.
        scaled = [Part("indexer", DType.U8, (page_tokens * 132,), Per.PAGE)]
        rows = [Part("rows", DType.U8, (page_tokens * 37 + 19,), Per.PAGE)]
        return [
            latent,
            pool("keys", kind=PoolKind.K_ONLY, parts=keys[:1], indices_from="kv"),
            pool("indexer", kind=PoolKind.INDEXER, parts=scaled),
            pool("compressed", kind=PoolKind.COMPRESSED, parts=rows),
        ]
    kv = [pool("kv", anchor=True), pool("draft", **of_draft)]
    if family == "mha":
        return kv
    state = [
        Part("temporal", DType.F32, (HEADS, 30), Per.PAGE, 0),
        Part("conv_0", DType.BF16, (HEADS, 14), Per.PAGE, 0),
    ]
    window_pages = max(1, WINDOW // page_tokens)
    trailing: dict[str, Any] = {"hit_policy": HitPolicy.TRAILING_PAGES}
    return [
        *kv,
        pool("mamba", kind=PoolKind.MAMBA, parts=state, window_pages=1, **trailing),
        pool("swa", kind=PoolKind.SWA, window_pages=window_pages, **trailing),
    ]


@attrs.define(eq=False)
class Rank(Peer):
    """One rank, attached to an installed backend."""

    backend: str = ""
    given: dict[str, object] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Attach."""
        dock = Dock.load(
            require=[self.backend], environ={"KVDOCK_PLUGINS": self.backend}
        )
        given = {self.backend: self.given}
        plan = dock.plan(
            self.pools,
            self.shard,
            needs=RouteRequirements(peers=True),
            settings=given,
        )
        nbytes = {one.name: one.page_bytes(self.shard) for one in self.pools}
        self.memory = {
            name: np.zeros(size * self.pages, np.uint8) for name, size in nbytes.items()
        }
        regions = {
            one.name: Region.of(one, self.shard, [self.memory[one.name]], self.pages)
            for one in self.pools
        }
        self.attachment = Attachment.open(
            dock, plan, self.namespace, regions, core=self.core, settings=given
        )
        self.transfers = PeerTransfers(self.attachment)


class Worker:
    """The ranks of one process.

    Args:
        backend: Its name.
        given: Its settings.
    """

    def __init__(self, backend: str, given: dict[str, object]) -> None:
        self.backend = backend
        self.given = given
        self.ranks: list[Rank] = []
        self.requests: dict[tuple[int, int], Any] = {}
        self.took_s = 0.0

    def seconds(self) -> float:
        """Return how long the last send took."""
        return self.took_s

    def open(self, spec: tuple[str, int, list[str]], size: int, verify: bool) -> None:  # noqa: FBT001 - sent over a pipe
        """Attach all ranks, after closing those that there are."""
        for one in self.ranks:
            assert one.attachment.close(LONG_S), "bytes may still move"
        pools = pools_of(*spec)
        core = settings(peers={"verify": verify})
        self.ranks = [
            Rank(
                pools,
                TOKENS // spec[1],
                Shard(tp_rank=rank, tp_size=size),
                core,
                backend=self.backend,
                given=self.given,
            )
            for rank in range(size)
        ]

    def offers(self, *, receives: bool) -> list[Any]:
        """Return the offers of all ranks."""
        return [one.transfers.offers(receives=receives) for one in self.ranks]

    def spans(self) -> list[tuple[int, int]]:
        """Return the heads of each rank."""
        return [one.grid("kv").parts[0].heads for one in self.ranks]

    def fill(self, content: tuple[int, int], where: dict[str, Any]) -> None:
        """Write what tokens hold into pages."""
        for one in self.ranks:
            one.fill(self.content(*content), where)

    def content(self, tokens: int, seed: int) -> Content:
        """Return what tokens hold."""
        pools = self.ranks[0].pools
        by_page = any(pool.kind is PoolKind.INDEXER for pool in pools)
        states = -(-tokens // pools[0].page_tokens) if by_page else 1
        return Content(pools, tokens, states, seed=seed)

    def expect(self, rank: int, number: int, slots: Any, offers: Any) -> Any:
        """Lease slots; return the tickets."""
        for memory in self.ranks[rank].memory.values():
            memory[:] = 0
        request = self.ranks[rank].transfers.expect(slots, offers)
        self.requests[rank, number] = request
        return request.tickets

    def send(
        self, rank: int, offers: Any, ticket: bytes, pages: Any, *, stop: bool
    ) -> bytes:
        """Send one ticket; return the completion."""
        began = time.perf_counter()
        future = self.ranks[rank].transfers.send(offers, ticket, pages)
        if stop:
            future.abort()
        assert future.wait_quiet(LONG_S)
        self.took_s = time.perf_counter() - began
        return future.completion().to_bytes()

    def misuse(
        self, rank: int, offers: Any, ticket: bytes, pages: Any
    ) -> tuple[str, bytes | None]:
        """Try a ticket that is over; return why it is refused, and a completion.

        A ticket that was never used is declined.
        """
        peers = self.ranks[rank % len(self.ranks)].transfers
        late = Ticket.from_bytes(ticket)
        while late.duration_s < LONG_S / 2 and time.monotonic() < late.expires_s:
            time.sleep(0.0001)
        try:
            future = peers.send(offers, late, pages)
        except TicketError as error:
            try:
                return error.reason, peers.decline(ticket).to_bytes()
            except TicketError:
                return error.reason, None
        except KvdockError:
            return "other pools", None
        assert future.wait_quiet(LONG_S)
        return "sent", future.completion().to_bytes()

    def expire(self, rank: int, number: int, slots: Any, offers: Any) -> Any:
        """Lease slots for a moment that is over; return the tickets."""
        peers = self.ranks[rank].transfers
        request = peers.expect(slots, offers, timeout_s=0.02)
        request.wait(LONG_S)
        self.requests[rank, number] = request
        return request.tickets

    def arrived(self, rank: int, number: int, completions: list[bytes]) -> str:
        """Complete a request; return what became of it."""
        request = self.requests.pop((rank, number))
        for message in completions:
            self.ranks[rank].transfers.complete(message)
        state = str(request.state)
        assert request.free, "slots are held"
        return state

    def wrong(self, content: tuple[int, int], slots: list[Any], windows: Any) -> int:
        """Compare what all ranks hold; return how many bytes are wrong."""
        expected = self.content(*content)
        found = expected.blank()
        for one, own in zip(self.ranks, slots, strict=True):
            part = one.read(expected, own)
            for name in found.memory:
                # Each rank has read its own heads into memory of zeros.
                found.memory[name] |= part.memory[name]
        count = 0
        for name, memory in found.memory.items():
            if name in slots[0]:
                wanted = self.from_token(expected, name, windows.get(name, 0))
                count += int(np.count_nonzero(memory != wanted))
        return count

    def from_token(self, content: Content, name: str, first: int) -> Any:
        """Return what a pool holds from a token on; bytes before it are 0."""
        blank = content.blank()
        number = np.arange(content.counts[name])
        kept = np.where(number < first, -1, number)
        move(match(content.grids[name], blank.grids[name], number, kept))
        return blank.memory[name]


def serve(link: Connection, backend: str, given: dict[str, object]) -> None:
    """Do what the parent asks for."""
    worker = Worker(backend, given)
    while True:
        try:
            name, arguments, options = link.recv()
        except EOFError:
            os._exit(0)
        try:
            link.send((True, getattr(worker, name)(*arguments, **options)))
        except BaseException as error:  # noqa: BLE001 - for the parent to raise
            link.send((False, repr(error)))


class Remote:
    """A worker in a process of its own."""

    def __init__(self, backend: str, given: dict[str, object]) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, backend, given), daemon=True
        )
        self.process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the worker."""
        self.link.send((name, arguments, options))
        assert self.link.poll(2 * LONG_S), f"{name} does not answer"
        good, found = self.link.recv()
        if not good:
            raise RuntimeError(f"{name}: {found}")
        return found


@attrs.define(eq=False)
class Trial:
    """Two processes, and the figures so far."""

    sender: Remote
    receiver: Remote
    rng: np.random.Generator
    figures: dict[str, int] = attrs.field(factory=dict)
    over: list[tuple[int, Any, bytes]] = attrs.field(factory=list)
    """Rank, offers and ticket of requests that are over."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a figure."""
        self.figures[name] = self.figures.get(name, 0) + number

    def pick(self, choices: Any) -> Any:
        """Choose one at random."""
        return choices[int(self.rng.integers(len(choices)))]

    def attach(self) -> tuple[int, int, str]:
        """Attach both sides anew; return the page sizes and the family."""
        family = self.pick(FAMILIES)
        ranks = self.pick(RANKS) if family in ("mha", "hybrid") else (1, 1)
        verify = bool(self.rng.integers(2))
        sizes = self.pick(PAGES), self.pick(PAGES)
        if family == "sparse":
            sizes = sizes[0], sizes[0]
        for side, size, page in zip(
            (self.sender, self.receiver), ranks, sizes, strict=True
        ):
            layouts = self.rng.permutation([str(one) for one in Layout]).tolist()
            side.call("open", (family, page, layouts), size, verify)
        self.count(f"{family}, TP{ranks[0]} to TP{ranks[1]}")
        return sizes[0], sizes[1], family

    def request(self, number: int, sizes: tuple[int, int], family: str) -> None:
        """Send one request from all ranks to all ranks, and compare."""
        rng, mine, theirs = self.rng, *sizes
        tokens = int(rng.integers(1, TOKENS + 1))
        content = (tokens, number)
        kind = self.pick(SLOTS)
        own = pages_for(tokens, mine, rng, TOKENS // mine)
        pages: dict[str, Any] = {"kv": own}
        slots: dict[str, Any] = {"kv": slots_for(kind, tokens, TOKENS, rng)}
        windows = {}
        where = dict(pages)
        if family in ("mha", "hybrid"):
            where["draft"] = own
        if family == "sparse":
            where["keys"] = own
            for name in ("indexer", "compressed"):
                where[name] = pages[name] = rng.permutation(TOKENS // mine)[: len(own)]
                slots[name] = rng.permutation(TOKENS // mine)[: len(own)]
        if family == "hybrid":
            windows["swa"] = self.window(pages, slots, tokens, sizes)
            pages["mamba"] = [int(rng.integers(TOKENS // mine))]
            slots["mamba"] = [int(rng.integers(TOKENS // theirs))]
            where |= {"mamba": pages["mamba"], "swa": pages["swa"]}
        self.sender.call("fill", content, where)
        states, given = [], []
        spans = self.sender.call("spans"), self.receiver.call("spans")
        senders = self.sender.call("offers", receives=False)
        offers = self.receiver.call("offers", receives=True)
        stop = not rng.integers(25)
        for rank, (low, high) in enumerate(spans[1]):
            shared = {name: slots["kv"] for name in SHARED if name in where}
            given.append({**slots, **shared})
            chosen = [
                n for n, (a, b) in enumerate(spans[0]) if max(a, low) < min(b, high)
            ]
            from_them = [senders[n] for n in chosen]
            if not rng.integers(10):
                self.expired(
                    (rank, number), slots, from_them, chosen, pages, offers[rank]
                )
            tickets = self.receiver.call("expect", rank, number, slots, from_them)
            self.replays(offers[rank], pages)
            done = [
                self.sender.call("send", n, offers[rank], ticket, pages, stop=stop)
                for n, ticket in zip(chosen, tickets, strict=True)
            ]
            states.append(self.receiver.call("arrived", rank, number, done))
            self.over += [
                (n, offers[rank], one) for n, one in zip(chosen, tickets, strict=True)
            ]
            self.replays(offers[rank], pages, last=True)
            self.count("transfers", len(done))
        if all(state == "arrived" for state in states):
            self.count("requests arrived")
            self.count(f"slots {kind}")
            wrong = self.receiver.call("wrong", content, given, windows)
            self.count("wrong bytes", wrong)
        elif stop:
            self.count("requests aborted")
        else:
            self.count("requests lost")

    def replays(self, offers: Any, pages: Any, *, last: bool = False) -> None:
        """Send tickets of requests that are over, with old offers and new ones."""
        while len(self.over) > TICKETS_KEPT:
            self.over.pop(int(self.rng.integers(len(self.over) - 8)))
        if not self.over:
            return
        rank, old, ticket = self.over[-1] if last else self.pick(self.over)
        given = offers if self.rng.integers(2) else old
        reason, _ = self.sender.call("misuse", rank, given, ticket, pages)
        self.count(f"tickets again: {reason}")

    def expired(
        self,
        which: tuple[int, int],
        slots: Any,
        own: Any,
        chosen: list[int],
        pages: Any,
        offers: Any,
    ) -> None:
        """Begin a request that is over before its tickets are sent."""
        rank, number = which
        tickets = self.receiver.call("expire", rank, number, slots, own)
        if self.rng.integers(2):
            # They say which tickets are void.
            offers = self.receiver.call("offers", receives=True)[rank]
        done: list[Any] = []
        for n, ticket in zip(chosen, tickets, strict=True):
            reason, message = self.sender.call("misuse", n, offers, ticket, pages)
            self.count(f"tickets too late: {reason}")
            done.append(message)
        state = self.receiver.call("arrived", rank, number, done)
        assert state == "failed", state

    def window(
        self, pages: Any, slots: Any, tokens: int, sizes: tuple[int, int]
    ) -> int:
        """Choose pages and slots of a window; return its first token."""
        mine, theirs = sizes
        window = max(1, WINDOW // theirs) * theirs
        first = max(0, tokens - window)
        pages["swa"] = pages_for(tokens, mine, self.rng, TOKENS // mine)
        pages["swa"][: first // mine] = -1
        slots["swa"] = slots_for("scattered", tokens, TOKENS, self.rng)
        slots["swa"][:first] = -1
        return first


def run(
    backend: str,
    transfers: int,
    seed: int,
    given: dict[str, object],
    most_s: float = LONG_S,
) -> dict[str, Any]:
    """Send requests until there were so many transfers; return the figures."""
    began = time.monotonic()
    sides = Remote(backend, given), Remote(backend, given)
    trial = Trial(*sides, np.random.default_rng(seed))
    # A few pairs of attachments for a short run, many for a long one.
    each = min(REQUESTS_EACH, max(4, transfers // 10))
    number = 0
    mine, theirs, family = 1, 1, ""
    try:
        while trial.figures.get("transfers", 0) < transfers:
            if time.monotonic() > began + most_s:
                break
            if number % each == 0:
                mine, theirs, family = trial.attach()
            number += 1
            trial.request(number, (mine, theirs), family)
    finally:
        for side in sides:
            side.process.kill()
            side.process.join()
    counted = {"wrong bytes": 0, "requests lost": 0, **trial.figures}
    took_s = round(time.monotonic() - began, 1)
    return {**counted, "backend": backend, "seed": seed, "seconds": took_s}


@contextmanager
def settings_of(backend: str) -> Iterator[dict[str, object]]:
    """Yield the settings of a backend, with what it needs running."""
    if backend == "mooncake":
        server = importlib.import_module("kvdock_mooncake.server")
        master = server.start_master()
        try:
            lent = {"segment_bytes": "64 MiB"}
            yield {"master": master.address, "host": "127.0.0.1", **lent}
        finally:
            master.stop()
        return
    with tempfile.TemporaryDirectory() as root:
        yield {"root": root, "free_space": 0}


def main(backend: str, transfers: str, seed: str = "1", most_s: str = "3600") -> None:
    """Run as a program."""
    with settings_of(backend) as given:
        found = run(backend, int(transfers), int(seed), given, float(most_s))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
