"""The output of `kvdock audit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell, plain

if TYPE_CHECKING:
    from kvdock_cli.engine_client import EngineClient


Compared = Mapping[str, Any]
"""One prompt, answered from the cache and computed anew.

Its `line` and `prompt`; the `salt` of the second request; both answers (`restored`,
`anew`); how many tokens are the same from the first on (`same_tokens`); the `largest`
difference of log-probabilities up to there, and whether that `differs` by more than the
tolerance.
"""


_COLUMNS = (
    Column("LINE", "line"),
    Column("CACHED", lambda row: row["restored"].cached),
    Column("SAME TOKENS", "same_tokens"),
    Column("DIFFERENCE", lambda row: f"{row['largest']:.3g}"),
)


def report(
    client: EngineClient,
    compared: Sequence[Compared],
    *,
    tolerance: float,
    computed: int,
    in_memory: int,
) -> Report:
    """Report the counts first, then the prompts that differ.

    Args:
        client: The engine that was asked.
        compared: Prompts that were restored.
        tolerance: By how much log-probabilities may differ.
        computed: Prompts of which nothing was cached.
        in_memory: Prompts of which storage gave nothing, and the engine's own memory
            what was cached.
    """
    differing = [one for one in compared if one["differs"]]
    good = bool(compared) and not differing
    verdict = "None of the prompts was restored, so nothing was compared."
    if compared:
        verdict = (
            f"{len(differing)} of {len(compared):,} restored prompts differed "
            f"by more than {tolerance:g} in a log-probability."
        )
    blocks: list[Block] = [Cell(verdict, Tone.GOOD if good else Tone.BAD)]
    if computed:
        blocks.append(
            f"Of {computed} prompts nothing was cached: send them once, and ask "
            "again when the engine has stored them."
        )
    if in_memory:
        blocks.append(
            f"Of {in_memory} prompts the engine had in its own memory what was "
            "cached: empty that, as with /flush_cache of SGLang, and ask again."
        )
    if any(one["restored"].cached is None for one in compared):
        blocks.append(
            "The engine does not say what it restored: start vLLM with "
            "--enable-prompt-tokens-details."
        )
    data = {
        **plain(client),
        "tolerance": tolerance,
        "restored": len(compared),
        "computed": computed,
        "in_memory": in_memory,
        "restored_tokens": sum(
            answer.cached or 0 if answer.restored is None else answer.restored
            for answer in (one["restored"] for one in compared)
        ),
        "largest": max((one["largest"] for one in compared), default=0.0),
        "differing": differing,
    }
    blocks.append(Table(_COLUMNS, differing))
    return Report("kvdock.audit/1", data, blocks, good)
