"""The output of `kvdock bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table, spelt
from kvdock_cli.reports._style import Tone

if TYPE_CHECKING:
    from kvdock_cli.bench.measure import Figure


def report(
    backend: str,
    figures: Sequence[Figure],
    *,
    raw: str,
    runs: int,
    token_bytes: int,
    recompute: float = 0.0,
    recompute_from: str = "",
) -> Report:
    """Report the figures as tables, and what they mean for an engine.

    Args:
        backend: Its name.
        figures: Of each size of page and batch.
        raw: What stands beside it: "disk" or "loopback".
        runs: Batches that were timed for each figure.
        token_bytes: KV bytes of a token.
        recompute: Tokens that the engine prefills per second; 0 where that is not
            known.
        recompute_from: How that is known: "given" or "engine", which was measured.
    """
    # A restore takes the time of a look-up and of its bytes at the best pace.
    restored = max(one.pace(one.get_s) for one in figures) / token_bytes
    start_s = min(one.exists_s + one.get_s for one in figures)
    data = {
        "backend": backend,
        "raw": raw,
        "runs": runs,
        "figures": figures,
        "token_bytes": token_bytes,
        "restored_tokens_per_s": restored,
        "recompute_tokens_per_s": recompute,
        "recompute_from": recompute_from,
        "break_even_tokens": int(start_s / (1 / recompute - 1 / restored)) + 1
        if 0 < recompute < restored
        else None,
    }
    beside = raw.upper()
    columns = (
        *_SHAPE,
        _paced("PUT", lambda one: one.put_s),
        _paced("GET", lambda one: one.get_s, Tone.STRONG),
        _paced(f"{beside} WRITE", lambda one: one.raw_write_s, Tone.FAINT, drop=1),
        _paced(f"{beside} READ", lambda one: one.raw_read_s, Tone.FAINT, drop=3),
        Column("PUT MS", lambda one: f"{one.put_s * 1e3:.2f}", drop=2),
        Column("GET MS", lambda one: f"{one.get_s * 1e3:.2f}"),
        Column("EXISTS MS", lambda one: f"{one.exists_s * 1e3:.2f}", drop=4),
    )
    spread = (
        *_SHAPE,
        _paced("SLOWEST PUT", lambda one: one.spread_s["put"][1]),
        _paced("FASTEST", lambda one: one.spread_s["put"][0]),
        _paced("SLOWEST GET", lambda one: one.spread_s["get"][1]),
        _paced("FASTEST", lambda one: one.spread_s["get"][0]),
    )
    blocks: list[Block] = [
        Table(columns, figures),
        "",
        f"Median of {runs} runs, which lie between",
        Table(spread, figures),
        "",
        _meaning(data),
    ]
    return Report("kvdock.bench/1", data, blocks)


def _paced(
    heading: str,
    seconds_of: Callable[[Figure], float],
    tone: Tone | None = None,
    drop: int = 0,
) -> Column:
    """Return a column of bytes a second; "-" where the time is not known."""
    return Column(
        heading,
        lambda one: spelt("bytes_per_s", one.pace(seconds_of(one)) or None),
        drop=drop,
        tone=tone,
    )


_SHAPE = (
    Column("PAGE", "page_bytes"),
    Column("BATCH", "batch"),
    Column("THREADS", "threads", drop=5),
)


def _meaning(data: Mapping[str, Any]) -> str:
    first = (
        f"At best {data['restored_tokens_per_s']:,.0f} tokens per second are restored, "
        f"at {format_bytes(data['token_bytes'])} a token (--token-bytes)."
    )
    if not data["recompute_tokens_per_s"]:
        return (
            f"{first} Restoring pays where an engine prefills fewer: --engine URL "
            "measures that, --recompute takes a figure."
        )
    measured = " (measured)" if data["recompute_from"] == "engine" else ""
    prefilled = f"{data['recompute_tokens_per_s']:,.0f}{measured}"
    if data["break_even_tokens"] is None:
        return f"{first} An engine that prefills {prefilled} is faster without storage."
    return (
        f"{first} Against {prefilled} that are prefilled, restoring is faster from "
        f"{data['break_even_tokens']:,} tokens on."
    )
