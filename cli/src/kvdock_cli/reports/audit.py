"""The output of `kvdock audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import paragraph, plain, table

if TYPE_CHECKING:
    from kvdock_cli.engine_client import Completion, Prompt

SCHEMA = "kvdock.audit/1"


@attrs.frozen
class Compared:
    """One prompt, answered from the cache and computed anew.

    Args:
        line: Its line in the file.
        prompt: The prompt.
        salt: The salt of the second request.
        restored: The answer that used what was cached.
        anew: The other; None if nothing was cached, so that there is nothing to
            compare.
        same_tokens: How many tokens are the same from the first on.
        largest: The largest difference of log-probabilities up to there.
        differs: Whether that is more than the tolerance.
    """

    line: int
    prompt: Prompt
    salt: str
    restored: Completion
    anew: Completion | None
    same_tokens: int = 0
    largest: float = 0.0
    differs: bool = False


@attrs.frozen
class Audit:
    """The result for all prompts of a file."""

    url: str
    engine: str
    model: str
    tolerance: float
    compared: tuple[Compared, ...]

    @property
    def restored(self) -> int:
        """Prompts of which something was cached, or may have been."""
        return sum(one.anew is not None for one in self.compared)

    @property
    def differing(self) -> tuple[Compared, ...]:
        """Prompts whose answers differ."""
        return tuple(one for one in self.compared if one.differs)

    @property
    def ok(self) -> bool:
        """Return whether something was compared, and nothing differed."""
        return bool(self.restored) and not self.differing


def audit_text(found: Audit, style: Style = PLAIN) -> str:
    """Render the result: the counts first, then the prompts that differ."""
    differ = len(found.differing)
    head = (
        f"{differ} of {found.restored:,} restored prompts differed by more than "
        f"{found.tolerance:g} in a log-probability."
    )
    if not found.restored:
        head = "None of the prompts was restored, so nothing was compared."
    lines = paragraph(head, style)
    lines[0] = style.paint(lines[0], Tone.GOOD if found.ok else Tone.BAD)
    left = len(found.compared) - found.restored
    if left:
        lines += paragraph(
            f"{left} prompts were computed, as nothing of them was cached: send them "
            "once, and ask again when the engine has stored them.",
            style,
        )
    if any(one.restored.cached is None for one in found.compared):
        lines += paragraph(
            "The engine does not say what it restored: start vLLM with "
            "--enable-prompt-tokens-details.",
            style,
        )
    parted = sum(
        one.anew is not None and one.same_tokens < len(one.anew.tokens)
        for one in found.compared
        if not one.differs
    )
    if parted:
        lines += paragraph(
            f"{parted} went on with another token of the same probability.", style
        )
    if found.differing:
        rows = [
            (str(one.line), str(one.restored.cached), str(one.same_tokens),
             f"{one.largest:.3g}")
            for one in found.differing
        ]  # fmt: skip
        lines += [
            "",
            *table(("LINE", "CACHED", "SAME TOKENS", "DIFFERENCE"), rows, style),
        ]
        lines += paragraph(
            "--json has the prompts, salts, tokens and log-probabilities of these.",
            style,
        )
    return "\n".join(lines)


def audit_data(found: Audit) -> dict[str, object]:
    """Describe the result, with all that reproduces what differs."""
    return {
        "schema": SCHEMA,
        "ok": found.ok,
        "url": found.url,
        "engine": found.engine,
        "model": found.model,
        "tolerance": found.tolerance,
        "prompts": len(found.compared),
        "restored": found.restored,
        "restored_tokens": sum(one.restored.cached or 0 for one in found.compared),
        "largest": max((one.largest for one in found.compared), default=0.0),
        "differing": [plain(one) for one in found.differing],
    }
