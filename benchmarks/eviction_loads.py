"""Loads that eviction and tiers are tried on, generated.

Published ones are read by `kvdock_cli.simulation.traces`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvdock_cli.simulation.traces import Trace

Blocks = npt.NDArray[np.int64]


class _Fresh:
    """Blocks that no request had before."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> Blocks:
        self._next += count
        return np.arange(self._next - count, self._next)


def _conversations(
    rng: np.random.Generator, fresh: _Fresh, active: int, ends: float, turn: int = 12
) -> Iterator[Blocks]:
    """Yield turns of conversations over shared prompts; some are more active."""
    prompts = [fresh(int(blocks)) for blocks in rng.integers(2, 40, 20)]
    talks: list[Blocks] = []
    while True:
        if len(talks) < active:
            talks.append(prompts[int(len(prompts) * rng.random() ** 2)])
            at = len(talks) - 1
        else:
            at = int(len(talks) * rng.random() ** 1.5)
        talks[at] = np.concatenate([talks[at], fresh(1 + int(rng.geometric(1 / turn)))])
        yield talks[at]
        if rng.random() < ends:
            del talks[at]


def conversations(requests: int) -> Trace:
    """Generate conversations of several turns over shared system prompts."""
    rng, fresh = np.random.default_rng(7), _Fresh()
    made = _conversations(rng, fresh, 200, 0.05)
    return Trace.of("conversations", [next(made) for _ in range(requests)])


def scans(requests: int) -> Trace:
    """Generate a hot set of prompts and, in between, prompts that come once."""
    rng, fresh = np.random.default_rng(1), _Fresh()
    hot = [
        fresh(int(blocks)) for blocks in rng.integers(10, 60, max(1, requests // 100))
    ]
    made = [
        hot[int(rng.integers(len(hot)))]
        if rng.random() < 0.4
        else fresh(int(rng.integers(20, 80)))
        for _ in range(requests)
    ]
    return Trace.of("hot set and scans", made)


def bursts(requests: int) -> Trace:
    """Generate conversations, interrupted by bursts of prompts that come once."""
    rng, fresh = np.random.default_rng(2), _Fresh()
    talks = _conversations(rng, fresh, 60, 0.12)
    made: list[Blocks] = []
    while len(made) < requests:
        made += [next(talks) for _ in range(200)]
        made += [fresh(int(rng.integers(20, 80))) for _ in range(100)]
    return Trace.of("bursts", made[:requests])


def loop(requests: int) -> Trace:
    """Generate a fixed sequence of prompts that comes again and again."""
    rng, fresh = np.random.default_rng(3), _Fresh()
    items = [
        fresh(int(blocks)) for blocks in rng.integers(5, 60, max(1, requests // 20))
    ]
    return Trace.of("loop", [items[at % len(items)] for at in range(requests)])


def tenants(requests: int) -> Trace:
    """Generate three tenants: few long talks, many short ones, and single prompts."""
    rng, fresh = np.random.default_rng(4), _Fresh()
    each = [
        _conversations(rng, fresh, active, ends, turn)
        for active, ends, turn in ((20, 0.05, 6), (400, 0.3, 20), (100, 0.5, 40))
    ]
    which = rng.choice(3, requests, p=(0.4, 0.4, 0.2))
    return Trace.of("tenants", [next(each[tenant]) for tenant in which])


GENERATED: dict[str, Callable[[int], Trace]] = {
    "conversations": conversations,
    "scans": scans,
    "bursts": bursts,
    "loop": loop,
    "tenants": tenants,
}
"""Generators by name: each takes the number of requests."""
