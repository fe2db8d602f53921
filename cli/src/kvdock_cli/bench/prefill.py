"""Time how fast a running engine prefills: its own model, on its own hardware.

Nothing else stands for it: a small model on this machine's CPU, or the FLOPS of
a data sheet, is off by an order of magnitude either way (decision 0099).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

from kvdock.errors import KvdockError
from kvdock_cli.http_request import Answer, request

LONGEST_TOKENS = 4096
"""Tokens of the long prompt; the short one has a quarter of them."""

SHORTEST_TOKENS = 256
ROUNDS = 3
"""Prompts of each length that are timed, after one that warms up."""

_WITHIN_S = 120.0
_IDS = range(100, 1000)
"""Ids of tokens that every vocabulary has; a prompt of random ones is not cached."""

_SPARE_TOKENS = 16
_OK, _REJECTED = 200, (400, 413, 422)


def prefill_pace(url: str, done: Callable[[], None] = lambda: None) -> float:
    """Return the tokens that an engine prefills per second.

    Sends prompts of random tokens and asks for one token each. The difference
    of a long and a short prompt leaves out what every request costs.

    Args:
        url: Where the engine serves OpenAI's API, "http://host:port".
        done: Called after each request: `requests()` of them, or more where a
            long prompt is rejected.

    Raises:
        SettingsError: If it is not a URL.
        KvdockError: If no engine answers there, or none that can be timed.
    """
    root = url.rstrip("/").removesuffix("/v1")
    model, longest = _model(root)
    while True:
        rejected = _complete(root, model, longest)
        done()
        if rejected is None:
            break
        longest //= 2
        if longest < SHORTEST_TOKENS:
            raise KvdockError(
                f"{root} rejects prompts of {2 * longest} tokens: {rejected}",
                fix="Give the pace with --recompute.",
            )
    short = longest // 4
    _complete(root, model, short)
    done()
    seconds: dict[int, float] = {}
    for tokens in (short, longest):
        times = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            _complete(root, model, tokens)
            times.append(time.perf_counter() - began_s)
            done()
        seconds[tokens] = statistics.median(times)
    more_s = seconds[longest] - seconds[short]
    if more_s <= 0:
        raise KvdockError(
            f"{root} takes no longer for {longest} tokens than for {short}",
            fix="Try again while it serves nothing else, or give --recompute.",
        )
    return (longest - short) / more_s


def requests() -> int:
    """Return how many prompts are sent at least."""
    return 2 + 2 * ROUNDS


def _model(root: str) -> tuple[str, int]:
    """Return the name of the served model, and how long a prompt may be."""
    answer = request(f"{root}/v1/models", "", wanted="models")
    fix = "Name the port where the engine serves /v1/models."
    if answer.status != _OK:
        raise KvdockError(
            f"{root} does not name its model: status {answer.status}", fix=fix
        )
    try:
        served = json.loads(answer.text)["data"][0]
        room = int(served.get("max_model_len") or LONGEST_TOKENS + _SPARE_TOKENS)
        longest = min(LONGEST_TOKENS, room - _SPARE_TOKENS)
        return str(served["id"]), max(SHORTEST_TOKENS, longest)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise KvdockError(
            f"{root} does not name its model as OpenAI's API does: {error}", fix=fix
        ) from error


def _complete(root: str, model: str, tokens: int) -> str | None:
    """Let the engine prefill a prompt; return why it was rejected, or None."""
    prompt = random.choices(_IDS, k=tokens)  # noqa: S311 - not a secret
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1})
    answer = request(
        f"{root}/v1/completions", "", body=body, within_s=_WITHIN_S, wanted="tokens"
    )
    if answer.status == _OK:
        return None
    if answer.status in _REJECTED:
        return _reason(answer)
    raise KvdockError(
        f"{root} does not complete prompts: status {answer.status}, {_reason(answer)}",
        fix="Give the pace with --recompute.",
    )


def _reason(answer: Answer) -> str:
    """Return the first words of an error."""
    return " ".join(answer.text.split())[:200]
