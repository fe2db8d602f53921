"""Generation: plain greedy, and greedy with a draft model.

The speculative loop is our own because assisted generation in transformers
gives wrong tokens when it starts from a warm cache.
"""

import time
from collections.abc import Callable, Sequence

import attrs
import torch

from kvdock_transformers.paged import Running, feed


@attrs.frozen
class Generation:
    """The result of a run.

    `logits`: float32 (new tokens, vocabulary), the target's logits from which
    each token was chosen. `proposed` and `accepted` count draft tokens.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor
    first_token_at_s: float
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of proposed draft tokens that the target accepted."""
        return self.accepted / self.proposed if self.proposed else None


def generate(running: Running, prompt: Sequence[int], new_tokens: int) -> Generation:
    """Generate greedily.

    Args:
        running: The model; its cache holds a true prefix of `prompt`.
        prompt: All prompt token ids.
        new_tokens: How many tokens to generate.
    """
    row = feed(running, prompt[running.tokens :])[-1]
    rows, token_ids = [row], [int(row.argmax())]
    first_token_at_s = time.perf_counter()
    while len(token_ids) < new_tokens:
        row = feed(running, token_ids[-1:])[-1]
        rows.append(row)
        token_ids.append(int(row.argmax()))
    return Generation(tuple(token_ids), torch.stack(rows), first_token_at_s)


def generate_with_draft(
    target: Running,
    draft: Running,
    prompt: Sequence[int],
    new_tokens: int,
    draft_tokens: int,
    before_draft: Callable[[], None] = lambda: None,
) -> Generation:
    """Generate greedily, letting a draft propose and the target verify.

    The tokens are those of `generate`: a proposal counts only if it is what
    the target would have chosen. Both caches must allow their last tokens to
    be taken back, as those of full attention do.

    Args:
        target: The model whose tokens are wanted; its cache holds a true
            prefix of `prompt`.
        draft: The proposing model, with the same vocabulary and a cache that
            holds a true prefix of `prompt`, not necessarily the same one.
        prompt: All prompt token ids.
        new_tokens: How many tokens to generate.
        draft_tokens: How many tokens the draft proposes per round.
        before_draft: Called once, after the first token and before the
            draft's first step.

    Returns:
        Tokens, their logits, and the counts of proposed and accepted tokens.
    """
    known = list(prompt)
    row = feed(target, known[target.tokens :])[-1]
    rows = [row]
    known.append(int(row.argmax()))
    first_token_at_s = time.perf_counter()
    before_draft()
    proposed = accepted = 0
    while len(known) - len(prompt) < new_tokens:
        proposal = _propose(draft, known, draft_tokens)
        verified = feed(target, [known[-1], *proposal], keep=draft_tokens + 1)
        choices = [int(token) for token in verified.argmax(dim=-1)]
        right = _agreeing(proposal, choices)
        proposed += draft_tokens
        accepted += right
        rows.extend(verified[: right + 1])
        known.extend(choices[: right + 1])
        # The token chosen last is fed in the next round, so both caches end
        # just before it.
        _crop(target, len(known) - 1)
        _crop(draft, len(known) - 1)
    token_ids = tuple(known[len(prompt) :][:new_tokens])
    logits = torch.stack(rows[:new_tokens])
    return Generation(token_ids, logits, first_token_at_s, proposed, accepted)


def _propose(draft: Running, known: Sequence[int], count: int) -> list[int]:
    proposal: list[int] = []
    pending = list(known[draft.tokens :])
    for _ in range(count):
        token = int(feed(draft, pending)[-1].argmax())
        proposal.append(token)
        pending = [token]
    return proposal


def _agreeing(proposal: Sequence[int], choices: Sequence[int]) -> int:
    """Count how many proposals from the first on were chosen."""
    for position, token in enumerate(proposal):
        if token != choices[position]:
            return position
    return len(proposal)


def _crop(running: Running, tokens: int) -> None:
    surplus = running.tokens - tokens
    if surplus > 0:
        running.cache.crop(-surplus)
