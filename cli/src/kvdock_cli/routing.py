"""The command `kvdock route`: wiring only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdock.dock import Dock
from kvdock.errors import PoolError
from kvdock_cli.given import settings_of
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.pool_files import describe, from_words, read
from kvdock_cli.reports import plan as report


def route(  # noqa: PLR0913 - what routing depends on
    file: Path | None = None,
    /,
    *,
    pool: tuple[str, ...] = (),
    tp: str = "",
    page_tokens: int | None = None,
    prefer: tuple[str, ...] = (),
    to: tuple[str, ...] = (),
    strict: bool = False,
    json: bool = False,
) -> int:
    """Show which backend would keep which pool, and why.

    Args:
        file: Pools in TOML or JSON: a list [[pools]] with the fields of a
            PoolSpec, and a table [shard].
        pool: A pool in words, name=kv,kind=mha,layers=32,heads=8,dim=128; may
            be given several times. The first one is the anchor unless one
            says anchor.
        tp: Tensor-parallel rank and size, as 0/4.
        page_tokens: Tokens of a page where a pool does not say it; 64 unless
            said.
        prefer: Consider only this backend; several in order of preference.
        to: Give a pool to one backend only, as POOL=BACKEND.
        strict: Take optional pools for required ones.
        json: Print one line of JSON.
    """
    given: dict[str, Any] = dict(read(file)) if file else {}
    given["pools"] = [*given.get("pools", ()), *map(from_words, pool)]
    if page_tokens is not None:
        given["page_tokens"] = page_tokens
    if tp:
        given["shard"] = {**given.get("shard", {}), **_ranks(tp)}
    about = describe(given, where=str(file or "--pool"))
    dock = Dock.load()
    try:
        plan = dock.plan(
            about.pools,
            about.shard,
            prefer,
            overrides=settings_of(to),
            strict=strict,
        )
    except PoolError as error:
        raise UsageProblem(error.what, fix=error.fix) from error
    return emit(plan.explain(), report.as_data(plan), as_json=json)


def _ranks(text: str) -> dict[str, int]:
    rank, slash, size = text.partition("/")
    if not (slash and rank.isdecimal() and size.isdecimal()):
        raise UsageProblem(
            f"{text!r} is no rank and size", fix="Write --tp RANK/SIZE, such as 0/4."
        )
    return {"tp_rank": int(rank), "tp_size": int(size)}
