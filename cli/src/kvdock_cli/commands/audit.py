"""Compare what an engine makes of restored prompts with what it computes itself."""

from __future__ import annotations

import json as json_module
import math
import secrets
import time
from pathlib import Path

from kvdock.events import AUDITED
from kvdock_cli import progress
from kvdock_cli.arguments import patience, text_of
from kvdock_cli.engine_client import Completion, EngineClient, Prompt
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import audit as report


def audit(
    url: str,
    /,
    *,
    prompts: Path,
    tokens: int = 16,
    tolerance: float = 0.1,
    rate: float = 1.0,
    within: float = 120.0,
    json: bool = False,
) -> int:
    """Compare restored answers of a running engine with recomputed ones.

    Each prompt is sent twice: plainly, so that the engine takes what is cached of it,
    and under a fresh salt, so that it computes all of it. Both answers are greedy. They
    differ if a log-probability does by more than the tolerance, up to the first token
    that is not the same: equal tokens are not promised on a GPU. Exit 1 if a prompt
    differs, or if none was restored. What is computed under the fresh salts is not
    stored: engines with kvdock know these requests by their names.

    Args:
        url: The engine's HTTP server, such as http://127.0.0.1:30000.
        prompts: A file with a prompt a line: text, or JSON: a string or token ids.
        tokens: How many tokens to compare.
        tolerance: By how much log-probabilities may differ.
        rate: Most requests a second.
        within: How many seconds an answer may take.
        json: Print one line of JSON, with all that reproduces what differs.
    """
    if tokens < 1 or not 0 < rate < math.inf or not tolerance >= 0:
        raise UsageProblem("--tokens and --rate are above 0, --tolerance is not below")
    given = read_prompts(prompts)
    client = EngineClient.find(url, within_s=patience(within, "--within"))
    found: list[report.Compared] = []
    computed, in_memory, next_s = 0, 0, 0.0

    def complete(prompt: Prompt, salt: str = "") -> Completion:
        nonlocal next_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s = time.monotonic() + 1 / rate
        return client.complete(prompt, tokens=tokens, salt=salt, name=salt)

    with progress.shown("asking", total=len(given)) as bar:
        for line, prompt in given:
            restored = complete(prompt)
            if restored.cached == 0:
                computed += 1
            elif restored.restored == 0:
                in_memory += 1
            else:
                salt = f"{AUDITED}{secrets.token_hex(16)}"
                anew = complete(prompt, salt)
                same, largest = _compare(restored, anew)
                found.append(
                    {
                        "line": line,
                        "prompt": prompt,
                        "salt": salt,
                        "restored": restored,
                        "anew": anew,
                        "same_tokens": same,
                        "largest": largest,
                        "differs": largest > tolerance,
                    }
                )
            bar.advance()
    done = report.report(
        client, found, tolerance=tolerance, computed=computed, in_memory=in_memory
    )
    return emit(done, as_json=json)


def read_prompts(path: Path) -> list[tuple[int, Prompt]]:
    """Return the prompts of a file with the numbers of their lines.

    Raises:
        UsageProblem: If there are none.
    """
    lines = enumerate(text_of(path).splitlines(), 1)
    found = [(at, parse(line)) for at, line in lines if line.strip()]
    if not found:
        raise UsageProblem(f"{path} has no prompts", fix="Write one a line.")
    return found


def parse(text: str) -> Prompt:
    """Return a prompt: JSON's string or token ids, or the text itself."""
    try:
        given = json_module.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(given, str):
        return given
    ids = isinstance(given, list) and all(type(one) is int for one in given)
    return given if ids and given else text


def _compare(restored: Completion, anew: Completion) -> tuple[int, float]:
    """Return how many tokens are the same, and the largest difference up to there."""
    pairs = list(zip(restored.tokens, anew.tokens, strict=False))
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if len(restored.tokens) != len(anew.tokens):
        return same, math.inf
    # The first token that differs counts too: a tie has equal probabilities.
    gaps = [abs(a - b) for a, b in zip(restored.logprobs, anew.logprobs, strict=True)]
    wrong = any(map(math.isnan, gaps))
    return same, math.inf if wrong else max(gaps[: same + 1], default=0.0)
