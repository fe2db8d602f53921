"""Loads that eviction is tried on: published traces, and generated ones.

A load is a list of requests; a request is its blocks in the order of the prefix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]


@attrs.frozen
class Load:
    """Requests to replay, and what they add up to.

    Args:
        name: What the table calls it.
        requests: Blocks of each, as numbers from 0 to `unique` - 1.
        unique: Different blocks.
    """

    name: str
    requests: list[Blocks]
    unique: int

    @classmethod
    def of(cls, name: str, requests: list[Blocks]) -> Load:
        """Number the blocks of requests."""
        lengths = [len(request) for request in requests]
        kinds, numbers = np.unique(np.concatenate(requests), return_inverse=True)
        parts = np.split(numbers.reshape(-1).astype(np.int64), np.cumsum(lengths)[:-1])
        return cls(name, [part for part in parts if len(part)], len(kinds))

    @property
    def blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(map(len, self.requests))


def read_trace(path: Path, most: int) -> Load:
    """Read a trace of a serving system.

    Args:
        path: JSON lines with `hash_ids`, the blocks of a request in order, or with
            `ranges`: the first and the last block of each run of neighbours.
        most: Requests to read; 0 for all.
    """
    requests: list[Blocks] = []
    with path.open() as lines:
        for line in lines:
            if most and len(requests) >= most:
                break
            row = json.loads(line)
            if "ranges" in row:
                runs = [np.arange(first, last + 1) for first, last in row["ranges"]]
                blocks = np.concatenate([np.zeros(0, np.int64), *runs])
            else:
                blocks = np.array(row["hash_ids"], np.int64)
            requests.append(blocks.astype(np.int64))
    return Load.of(path.stem, requests)


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


def conversations(requests: int) -> Load:
    """Generate conversations of several turns over shared system prompts."""
    rng, fresh = np.random.default_rng(7), _Fresh()
    made = _conversations(rng, fresh, 200, 0.05)
    return Load.of("conversations", [next(made) for _ in range(requests)])


def scans(requests: int) -> Load:
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
    return Load.of("hot set and scans", made)


def bursts(requests: int) -> Load:
    """Generate conversations, interrupted by bursts of prompts that come once."""
    rng, fresh = np.random.default_rng(2), _Fresh()
    talks = _conversations(rng, fresh, 60, 0.12)
    made: list[Blocks] = []
    while len(made) < requests:
        made += [next(talks) for _ in range(200)]
        made += [fresh(int(rng.integers(20, 80))) for _ in range(100)]
    return Load.of("bursts", made[:requests])


def loop(requests: int) -> Load:
    """Generate a fixed sequence of prompts that comes again and again."""
    rng, fresh = np.random.default_rng(3), _Fresh()
    items = [
        fresh(int(blocks)) for blocks in rng.integers(5, 60, max(1, requests // 20))
    ]
    return Load.of("loop", [items[at % len(items)] for at in range(requests)])


def tenants(requests: int) -> Load:
    """Generate three tenants: few long talks, many short ones, and single prompts."""
    rng, fresh = np.random.default_rng(4), _Fresh()
    each = [
        _conversations(rng, fresh, active, ends, turn)
        for active, ends, turn in ((20, 0.05, 6), (400, 0.3, 20), (100, 0.5, 40))
    ]
    which = rng.choice(3, requests, p=(0.4, 0.4, 0.2))
    return Load.of("tenants", [next(each[tenant]) for tenant in which])


GENERATED: dict[str, Callable[[int], Load]] = {
    "conversations": conversations,
    "scans": scans,
    "bursts": bursts,
    "loop": loop,
    "tenants": tenants,
}
"""Generators by name: each takes the number of requests."""
