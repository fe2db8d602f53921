"""Time how fast a running engine prefills: its own model, on its own hardware.

Nothing else stands for it: a small model on this machine's CPU, or the FLOPS of
a data sheet, is off by an order of magnitude either way (decision 0099).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from kvdock.errors import KvdockError
from kvdock_cli.engine_client import EngineClient, RejectedError

LONGEST_TOKENS = 4096
"""Tokens of the long prompt; the short one has a quarter of them."""

SHORTEST_TOKENS = 256
ROUNDS = 3
"""Prompts of each length that are timed, after one that warms up."""

_IDS = range(100, 1000)
"""Ids of tokens that every vocabulary has; a prompt of random ones is not cached."""


def prefill_pace(url: str, done: Callable[[], None] = lambda: None) -> float:
    """Return the tokens that an engine prefills per second.

    Sends prompts of random tokens and asks for one token each. The difference
    of a long and a short prompt leaves out what every request costs.

    Args:
        url: The engine's HTTP server, "http://host:port".
        done: Called after each request: `requests()` of them, or more where a
            long prompt is rejected.

    Raises:
        SettingsError: If it is not a URL.
        KvdockError: If no engine answers there, or none that can be timed.
    """
    client = EngineClient.find(url)

    def seconds(tokens: int) -> float:
        prompt = random.choices(_IDS, k=tokens)  # noqa: S311 - not a secret
        began_s = time.perf_counter()
        try:
            client.complete(prompt, tokens=1)
            return time.perf_counter() - began_s
        finally:
            done()

    longest = LONGEST_TOKENS
    while True:
        try:
            seconds(longest)
            break
        except RejectedError:
            # Most likely its context is shorter.
            longest //= 2
            if longest < SHORTEST_TOKENS:
                raise
    short = longest // 4
    seconds(short)
    short_s, longest_s = (
        statistics.median(seconds(tokens) for _ in range(ROUNDS))
        for tokens in (short, longest)
    )
    if longest_s <= short_s:
        raise KvdockError(
            f"{url} takes no longer for {longest} tokens than for {short}",
            fix="Try again while it serves nothing else, or give --recompute.",
        )
    return (longest - short) / (longest_s - short_s)


def requests() -> int:
    """Return how many prompts are sent at least."""
    return 2 + 2 * ROUNDS
