"""Have a running engine bring prompts to the nearest tier before they are asked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from kvdock.hints import MOST_BYTES
from kvdock_cli import progress
from kvdock_cli.arguments import patience
from kvdock_cli.commands.audit import read_prompts
from kvdock_cli.engine_client import EngineClient
from kvdock_cli.output import emit
from kvdock_cli.reports._report import Report

_ENVELOPE_BYTES = 1 << 10
"""Bytes of a hint besides its tokens, and some to spare."""


def prefetch(
    url: str,
    /,
    *,
    prompts: Path,
    salt: str = "",
    within: float = 120.0,
    json: bool = False,
) -> int:
    """Warm the nearest tier of a running engine with given prompts.

    Each prompt goes as a hint with a request of one token, which is all that the
    engine computes. The copies are made in the background: the metric
    kvdock_hint_pages_total says how many pages are queued, present or absent. Of a
    prompt that is longer than a hint may be, some 9,000 tokens, only the beginning is
    copied.

    Args:
        url: The engine's HTTP server, such as http://127.0.0.1:30000.
        prompts: A file with a prompt a line: text, or JSON: a string or token ids.
        salt: The cache salt under which the prompts are stored.
        within: How many seconds an answer may take.
        json: Print one line of JSON.
    """
    given = read_prompts(prompts)
    client = EngineClient.find(url, within_s=patience(within, "--within"))
    total = cut = 0
    with progress.shown("asking", total=len(given)) as bar:
        for line, prompt in given:
            whole = list(client.tokenize(prompt))
            tokens = _beginning(whole)
            cut += len(tokens) < len(whole)
            action = {
                "action_id": str(line),
                "action_type": "kvdock.prefetch",
                "action_version": "1",
                "payload": {"tokens": tokens},
            }
            hints = {
                "protocol_version": "1",
                "message_id": "kvdock prefetch",
                "actions": [action],
            }
            client.complete(tokens[:1], tokens=1, salt=salt, hints=hints)
            total += len(tokens)
            bar.advance()
    text = f"asked for {len(given)} prompts, {total} tokens"
    if cut:
        text += f"; of {cut} prompts only for the beginning, as a hint has room for it"
    data = {"prompts": len(given), "tokens": total, "cut": cut}
    return emit(Report("kvdock.prefetch/1", data, [text]), as_json=json)


def _beginning(tokens: Sequence[int]) -> Sequence[int]:
    """Return as many tokens of a prompt as an engine reads of a hint."""
    ends = [*accumulate(len(f"{token},") for token in tokens)]
    return tokens[: bisect_right(ends, MOST_BYTES - _ENVELOPE_BYTES)]
