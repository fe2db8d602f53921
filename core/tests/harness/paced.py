"""A stand-in engine and a throttled store, in simulated time.

The engine computes at a known rate. The store takes a latency and a rate, with jitter,
and both may change at any moment. What they do with a decision is what
`AttachedPool` does: batches in turn, a look at the limit between them, and a call that
is still under way at the deadline is abandoned and goes on.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np

from kvdock.config.core import PaysSettings
from kvdock.events import LoadDecided
from kvdock.pays.curves import LoadMeter
from kvdock.pays.policy import LoadPolicy, Prefix

TOKENS = 16
"""Tokens of a page."""
STEP = 2048
"""Tokens of a step, at most."""


@attrs.define
class Clock:
    """Time that passes when it is told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@attrs.frozen(kw_only=True)
class Store:
    """What loads really take."""

    bytes_per_s: float
    latency_s: float = 0.0
    jitter: float = 0.0

    def seconds(self, nbytes: int, random_: random.Random | None = None) -> float:
        shake = 1.0
        if random_ is not None and self.jitter:
            shake += random_.uniform(-self.jitter, self.jitter)
        return shake * (self.latency_s + nbytes / self.bytes_per_s)


@attrs.frozen(kw_only=True)
class Engine:
    """What steps really take."""

    tokens_per_s: float = 20_000.0
    square: float = 2e-9
    step_s: float = 0.002

    def steps(self, start: int, end: int) -> list[tuple[tuple[int, int], float]]:
        """Return (prefix, tokens) and seconds of the steps from a token to another."""
        found = []
        while start < end:
            count = min(STEP, end - start)
            took = self.step_s + count / self.tokens_per_s
            took += self.square * count * (start + count / 2)
            found.append(((start, count), took))
            start += count
        return found

    def seconds(self, start: int, end: int) -> float:
        return sum(took for _, took in self.steps(start, end))


@attrs.define(eq=False, slots=False)
class StandIn:
    """Requests one after the other, each with a prefix that storage has."""

    engine: Engine
    store: Store
    pages: int = 256
    page_bytes: int = 1 << 20
    batch_pages: int = 32
    tail_tokens: int = 40
    settings: PaysSettings = attrs.field(factory=PaysSettings)
    seed: int = 0
    clock: Clock = attrs.field(factory=Clock)
    events: list[Any] = attrs.field(factory=list)
    skipped: list[Any] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 - shakes what a store takes
        self.policy = LoadPolicy(self.settings, self._told, self.clock)
        self.meter = LoadMeter(self.clock)
        self.late: list[tuple[float, float, int]] = []
        self.requests = 0

    def _told(self, event: Any) -> None:
        (self.events if isinstance(event, LoadDecided) else self.skipped).append(event)

    @property
    def end(self) -> int:
        return self.pages * TOKENS + self.tail_tokens

    def pass_time(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        for ended_s, began, nbytes in sorted(self.late):
            if ended_s <= until_s:
                self.clock.now_s = max(self.clock.now_s, ended_s)
                self.meter.end(began, "kv", nbytes, late=True)
                self.late.remove((ended_s, began, nbytes))
        self.clock.now_s = until_s

    def compute(self, start: int) -> None:
        for work, took in self.engine.steps(start, self.end):
            self.policy.compute.begin([work])
            self.pass_time(took)
            self.policy.compute.end()

    def load_all_s(self) -> float:
        """Return what loading all really takes, computing the rest included."""
        took = 0.0
        for at in range(0, self.pages, self.batch_pages):
            count = min(self.batch_pages, self.pages - at)
            took += self.store.seconds(count * self.page_bytes)
        return took + self.engine.seconds(self.pages * TOKENS, self.end)

    def best_s(self) -> float:
        return min(self.load_all_s(), self.engine.seconds(0, self.end))

    def request(self) -> float:
        """Serve a request; return the time to its first token."""
        self.requests += 1
        began_s, name = self.clock.now_s, str(self.requests)
        count = np.arange(self.pages + 1)
        curve = self.meter.curve("kv")
        calls = -(-count // self.batch_pages)
        prefix = Prefix(
            name,
            np.ones(self.pages + 1, np.bool_),
            curve.seconds(count * self.page_bytes, calls),
            count * TOKENS,
            self.end,
            {("store", "kv"): curve},
        )
        decision = self.policy.decide(prefix)
        done = self.load(decision.pages, decision.limit)
        self.policy.done(name)
        self.compute(done * TOKENS)
        return self.clock.now_s - began_s

    def load(self, pages: int, limit: Any) -> int:
        done, deadline_s = 0, float("inf")
        if limit is not None:
            deadline_s = limit.until(deadline_s)
        while done < pages:
            if done and limit is not None:
                if limit.reached(done / pages):
                    break
                deadline_s = limit.deadline_s
            if self.clock.now_s >= deadline_s:
                break
            count = min(self.batch_pages, pages - done)
            nbytes = count * self.page_bytes
            took = self.store.seconds(nbytes, self.random)
            began = self.meter.time.advance(1)[0]
            if self.clock.now_s + took > deadline_s:
                self.late.append((self.clock.now_s + took, began, nbytes))
                self.pass_time(deadline_s - self.clock.now_s)
                self.meter.abandon(began, "kv", nbytes)
                break
            self.pass_time(took)
            self.meter.end(began, "kv", nbytes)
            done += count
        return done
