"""Change recorded messages at random, and give them to both sides of a backend.

Usage: python peer_fuzz.py BACKEND MUTATIONS [SEED]

Both sides are in this process. Whatever comes, it is taken or rejected with an error
of kvdock's: nothing else is raised, no slot stays held, and a healthy request arrives
afterwards.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections import Counter
from typing import Any

import attrs
import msgspec
import numpy as np
from peer_trials import Rank, pools_of, settings_of
from peers import LONG_S, Content, settings

from kvdock import NO_PAGE, Outcome
from kvdock.errors import KvdockError
from kvdock.peers import Completion, Offer, RequestState, Ticket

PAGES = 16
TOKENS = 16
EACH = 500
"""Mutations between two healthy requests."""

HEAD_BYTES = 36
"""Format and signature; the MessagePack follows."""

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 255, 1 << 31, (1 << 56) - 1, 1 << 63, 0.5, float("inf"),
    float("nan"), "", "x", "x" * 300, b"", bytes(8), b"\xff" * 800, [], [[]], {},
    {"": 0},
)  # fmt: skip


def mutated(message: bytes, rng: np.random.Generator) -> bytes:
    """Change bytes of a message, or a value in its MessagePack."""
    if rng.integers(2):
        found = msgspec.msgpack.decode(message[HEAD_BYTES:])
        return message[:HEAD_BYTES] + msgspec.msgpack.encode(altered(found, rng))
    data = bytearray(message)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data) + 1))
        kind = rng.integers(5)
        if kind == 0:
            del data[at : at + int(rng.integers(1, 64))]
        elif kind == 1:
            data[at:at] = rng.bytes(int(rng.integers(1, 16)))
        elif kind == 2:
            data[at:at] = data[: int(rng.integers(1, 256))]
        elif at < len(data):
            data[at] = int(rng.integers(256)) if kind == 3 else data[at] ^ 1
    return bytes(data)


def altered(value: Any, rng: np.random.Generator) -> Any:
    """Change one value somewhere in a tree."""
    inner = value if isinstance(value, dict | list) else ()
    if not inner or not rng.integers(6):
        if isinstance(value, int) and rng.integers(2):
            return value + int(rng.integers(-2, 3))
        return ODD[int(rng.integers(len(ODD)))]
    if isinstance(value, dict):
        name = list(value)[int(rng.integers(len(value)))]
        rest = {key: one for key, one in value.items() if key != name}
        changes = (rest, {**rest, "more": value[name]})
        kind = int(rng.integers(8))
        if kind < len(changes):
            return changes[kind]
        return {**value, name: altered(value[name], rng)}
    at = int(rng.integers(len(value)))
    if not rng.integers(8):
        return [*value, value[at]]
    return [*value[:at], altered(value[at], rng), *value[at + 1 :]]


@attrs.define(eq=False)
class Fuzz:
    """Two attachments of one process, and what was counted."""

    backend: str
    sender: Rank
    receiver: Rank
    rng: np.random.Generator
    found: Counter[str] = attrs.field(factory=Counter)
    numbers: set[int] = attrs.field(factory=set)  # of changed tickets that were taken

    def healthy(self) -> tuple[bytes, bytes, bytes]:
        """Send a request; return its messages."""
        content = Content(self.sender.pools, TOKENS, seed=int(self.rng.integers(99)))
        pages = {"kv": np.arange(TOKENS // self.sender.pools[0].page_tokens)}
        slots = {"kv": np.arange(TOKENS)[::-1].copy()}
        self.sender.fill(content, pages)
        self.receiver.memory["kv"][:] = 0
        offer = self.receiver.transfers.offer("kv").to_bytes()
        offers = self.receiver.transfers.offers()
        request = self.receiver.transfers.expect(
            slots, [self.sender.transfers.offers(receives=False)]
        )
        if Ticket.from_bytes(request.tickets[0]).number in self.numbers:
            # A changed ticket had this number: the request fails, and the next one
            # has another number. A key keeps such tickets out.
            self.tried(
                "number",
                lambda: self.sender.transfers.send(offers, request.tickets[0], pages),
            )
            assert self.receiver.transfers.withdraw()
            return self.healthy()
        future = self.sender.transfers.send(offers, request.tickets[0], pages)
        assert future.wait_quiet(LONG_S)
        completion = future.completion().to_bytes()
        self.receiver.transfers.complete(completion)
        assert request.state is RequestState.ARRIVED, request.reason
        assert self.receiver.read(content, slots).equals(content, "kv")
        return offer, request.tickets[0], completion

    def tried(self, what: str, call: Any) -> Any:
        """Make a call that may only fail with an error of kvdock's."""
        began = time.process_time()
        try:
            found = call()
        except KvdockError:
            self.found[f"{what} rejected"] += 1
            found = None
        else:
            self.found[f"{what} taken"] += 1
        assert time.process_time() - began < 2, f"{what} takes too long"
        return found

    def offer(self, message: bytes) -> None:
        """Take a changed offer, at both sides."""
        offer = self.tried("offer", lambda: Offer.from_bytes(message))
        if offer is None:
            return
        own = importlib.import_module(f"kvdock_{self.backend}.peers")
        read = own.Connections.read_endpoint
        self.tried("endpoint", lambda: read(offer.endpoint))
        slots = np.where(np.arange(TOKENS) % 3 == 1, NO_PAGE, np.arange(TOKENS))
        request = self.tried(
            "offer of a sender",
            lambda: self.receiver.transfers.expect(
                {"kv": slots}, [{"kv": offer}], timeout_s=LONG_S
            ),
        )
        if request is not None:
            request.abort()
            outcomes = dict.fromkeys(
                Ticket.from_bytes(request.tickets[0]).pools, Outcome.REFUSED
            )
            ended = Completion(
                request=request.request, sender=0, ended=True, outcomes=outcomes
            )
            self.receiver.transfers.complete(ended)

    def ticket(self, message: bytes) -> None:
        """Take a changed ticket."""
        offers = self.receiver.transfers.offers()
        pages = {"kv": np.arange(TOKENS // self.sender.pools[0].page_tokens)}
        future = self.tried(
            "ticket",
            lambda: self.sender.transfers.send(offers, message, pages, timeout_s=10.0),
        )
        if future is None:
            self.tried("decline", lambda: self.sender.transfers.decline(message))
        else:
            self.numbers.add(Ticket.from_bytes(message).number)
            assert future.wait_quiet(LONG_S)
            self.found[f"sent: {dict(future.outcomes)}"[:60]] += 1

    def completion(self, message: bytes) -> None:
        """Take a changed completion."""
        self.tried("completion", lambda: self.receiver.transfers.complete(message))


def run(
    backend: str, mutations: int, seed: int, given: dict[str, object]
) -> dict[str, Any]:
    """Try so many changed messages; return what was counted."""
    began = time.monotonic()
    pools = pools_of("mha", 4, ["page_object"])[:1]
    core = settings(deadlines={"send": 10.0})
    sender, receiver = (
        Rank(pools, PAGES, core=core, backend=backend, given=given) for _ in range(2)
    )
    fuzz = Fuzz(backend, sender, receiver, np.random.default_rng(seed))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(mutations):
        if number % EACH == 0:
            offer, _, completion = fuzz.healthy()
        kind = number % 3
        if kind == 0:
            fuzz.offer(mutated(offer, fuzz.rng))
        elif kind == 1:
            own = [sender.transfers.offers(receives=False)]
            slots = {"kv": np.arange(TOKENS) + TOKENS}
            request = receiver.transfers.expect(slots, own)
            ticket = request.tickets[0]
            fuzz.ticket(mutated(ticket, fuzz.rng))
            try:
                ended = sender.transfers.decline(ticket)
            except KvdockError:
                # It was used in a changed form: its slots end with their endpoint.
                receiver.transfers.withdraw()
            else:
                receiver.transfers.complete(ended)
            assert request.free
        else:
            fuzz.completion(mutated(completion, fuzz.rng))
    fuzz.healthy()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert all(one.attachment.close(LONG_S) for one in (sender, receiver))
    return {
        "backend": backend,
        "mutations": mutations,
        "grown_mib": grown >> 10,
        "seconds": round(time.monotonic() - began, 1),
        **dict(sorted(fuzz.found.items())),
    }


def main(backend: str, mutations: str, seed: str = "1") -> None:
    """Run as a program."""
    with settings_of(backend) as given:
        found = run(backend, int(mutations), int(seed), given)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
