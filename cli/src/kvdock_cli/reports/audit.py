"""The output of `kvdock audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import paragraph, plain, table

if TYPE_CHECKING:
    from kvdock_cli.engine_client import Completion, EngineClient, Prompt

SCHEMA = "kvdock.audit/1"


@attrs.frozen(kw_only=True)
class Compared:
    """One prompt, answered from the cache and computed anew.

    Args:
        salt: The salt of the second request.
        same_tokens: How many tokens are the same from the first on.
        largest: The largest difference of log-probabilities up to there.
        differs: Whether that is more than the tolerance.
    """

    line: int
    prompt: Prompt
    salt: str
    restored: Completion
    anew: Completion
    same_tokens: int
    largest: float
    differs: bool


@attrs.frozen(kw_only=True)
class Audit:
    """The result for all prompts of a file; `computed` of them were not restored."""

    client: EngineClient
    tolerance: float
    compared: tuple[Compared, ...]
    computed: int

    @property
    def differing(self) -> tuple[Compared, ...]:
        """Prompts whose answers differ."""
        return tuple(one for one in self.compared if one.differs)


def audit_text(found: Audit, style: Style = PLAIN) -> str:
    """Render the result: the counts first, then the prompts that differ."""
    said = [
        f"{len(found.differing)} of {len(found.compared):,} restored prompts differed "
        f"by more than {found.tolerance:g} in a log-probability."
        if found.compared
        else "None of the prompts was restored, so nothing was compared."
    ]
    if found.computed:
        said.append(
            f"Of {found.computed} prompts nothing was cached: send them once, and ask "
            "again when the engine has stored them."
        )
    if any(one.restored.cached is None for one in found.compared):
        said.append(
            "The engine does not say what it restored: start vLLM with "
            "--enable-prompt-tokens-details."
        )
    lines = [line for one in said for line in paragraph(one, style)]
    good = found.compared and not found.differing
    lines[0] = style.paint(lines[0], Tone.GOOD if good else Tone.BAD)
    rows = [
        (str(one.line), str(one.restored.cached), str(one.same_tokens),
         f"{one.largest:.3g}")
        for one in found.differing
    ]  # fmt: skip
    heads = ("LINE", "CACHED", "SAME TOKENS", "DIFFERENCE")
    return "\n".join([*lines, *(table(heads, rows, style) if rows else ())])


def audit_data(found: Audit) -> dict[str, object]:
    """Describe the result, with all that reproduces what differs."""
    differing = found.differing
    return {
        "schema": SCHEMA,
        "ok": bool(found.compared) and not differing,
        **plain(found.client),
        "tolerance": found.tolerance,
        "restored": len(found.compared),
        "computed": found.computed,
        "restored_tokens": sum(one.restored.cached or 0 for one in found.compared),
        "largest": max((one.largest for one in found.compared), default=0.0),
        "differing": plain(differing),
    }
