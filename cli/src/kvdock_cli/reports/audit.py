"""The output of `kvdock audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell, plain

if TYPE_CHECKING:
    from kvdock_cli.engine_client import Completion, EngineClient, Prompt


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
    """The result for all prompts of a file.

    Args:
        computed: Prompts of which nothing was cached.
        in_memory: Prompts of which storage gave nothing, and the engine's own memory
            what was cached.
    """

    client: EngineClient
    tolerance: float
    compared: tuple[Compared, ...]
    computed: int
    in_memory: int = 0

    @property
    def differing(self) -> tuple[Compared, ...]:
        """Prompts whose answers differ."""
        return tuple(one for one in self.compared if one.differs)


_COLUMNS = (
    Column("LINE", "line"),
    Column("CACHED", lambda one: one.restored.cached),
    Column("SAME TOKENS", "same_tokens"),
    Column("DIFFERENCE", lambda one: f"{one.largest:.3g}"),
)


def report(found: Audit) -> Report:
    """Report the counts first, then the prompts that differ."""
    good = bool(found.compared) and not found.differing
    counts = (
        f"{len(found.differing)} of {len(found.compared):,} restored prompts differed "
        f"by more than {found.tolerance:g} in a log-probability."
    )
    none = "None of the prompts was restored, so nothing was compared."
    tone = Tone.GOOD if good else Tone.BAD
    blocks: list[Block] = [Cell(counts if found.compared else none, tone)]
    if found.computed:
        blocks.append(
            f"Of {found.computed} prompts nothing was cached: send them once, and ask "
            "again when the engine has stored them."
        )
    if found.in_memory:
        blocks.append(
            f"Of {found.in_memory} prompts the engine had in its own memory what was "
            "cached: empty that, as with /flush_cache of SGLang, and ask again."
        )
    if any(one.restored.cached is None for one in found.compared):
        blocks.append(
            "The engine does not say what it restored: start vLLM with "
            "--enable-prompt-tokens-details."
        )
    data = {
        **plain(found.client),
        "tolerance": found.tolerance,
        "restored": len(found.compared),
        "computed": found.computed,
        "in_memory": found.in_memory,
        "restored_tokens": sum(
            answer.cached or 0 if answer.restored is None else answer.restored
            for answer in (compared.restored for compared in found.compared)
        ),
        "largest": max((one.largest for one in found.compared), default=0.0),
        "differing": found.differing,
    }
    blocks.append(Table(_COLUMNS, found.differing))
    return Report("kvdock.audit/1", data, blocks, good)
