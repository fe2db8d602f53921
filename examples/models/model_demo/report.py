"""The output of the demos: lines while they run, tables, and one JSON object.

The command line prints it. Texts carry the name of a tone, and progress goes to a
line that does not stay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from kvdock.units import format_bytes
from model_demo.damage import Harm, Target
from model_demo.families import WORKLOADS, Family, Scale
from model_demo.records import Role, Served
from model_demo.trial import Event, Report
from model_demo.verdicts import LOGITS_TOLERANCE, Result

_TITLES = {
    Role.OFFLOAD: "Process 1 prefills the prompt, stores its pages, generates",
    Role.RESTORE: "Process 2 starts clean, restores the pages, generates",
    Role.RECOMPUTE: "Process 3 recomputes everything without a store",
    Role.REPAIR: "Process 4 restores what the damage left, recomputes the rest",
}
_PAST = {
    Harm.FLIP: "flipped",
    Harm.TRUNCATE: "truncated",
    Harm.DELETE: "deleted",
}
_MOST = 1e300
"""JSON has no infinity."""

Figures = Iterable[tuple[str, str]]
"""Rows of a table: what they show, and a value."""


class Screen(Protocol):
    """Where a demo shows what it does."""

    def say(self, text: str, tone: str = "") -> None:
        """Print lines; a tone is `strong`, `bad` or `good`."""

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show what is being done, and how much of it is done."""


@attrs.frozen
class Table:
    """A table: rows of cells under headings, with an empty row between sections."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@attrs.frozen
class Outcome:
    """The results of a demo.

    Args:
        tables: For people.
        failed: A line for each claim that did not hold.
        data: For programs.
    """

    tables: Sequence[Table]
    failed: Sequence[str]
    data: Mapping[str, object]


def show_head(
    screen: Screen,
    families: Sequence[Family],
    scale: Scale,
    backend: str,
    reason: str,
    notice: str,
) -> None:
    """Say what is about to be done, with which backend, and what was started."""
    work = WORKLOADS[scale]
    screen.say(
        f"Models {', '.join(families)}: random weights, made here.\n"
        f"Prompt of {work.prompt_tokens} tokens: "
        f"{work.prefix_pages} pages of {work.page_tokens}, and a tail.\n"
        f"Backend {backend}: {reason}."
    )
    if notice:
        screen.say(f"{notice[0].upper()}{notice[1:]}.")


def show_damage(screen: Screen, damages: Mapping[Family, Sequence[Target]]) -> None:
    """Say which pages were harmed, and how."""
    screen.say("\nStored pages are damaged", "strong")
    for family, damage in damages.items():
        done = [f"{pool} {page} {_PAST[harm]}" for pool, page, harm in damage]
        screen.say(f"  {family:5} {', '.join(done)}")


def show_events(screen: Screen) -> Report:
    """Return what shows the events of processes."""
    steps: dict[Role, str] = {}

    def show(event: Event) -> None:
        role, model = event["role"], event["model"]
        match event["event"]:
            case "start" if role in _TITLES:
                steps.clear()
                screen.say(f"\n{_TITLES[role]}", "strong")
                screen.say(f"  pid {event['pid']}")
            case "start":
                screen.say(f"  {role} has pid {event['pid']}")
            case "plan" if role is Role.OFFLOAD:
                lines = "\n    ".join(event["text"].splitlines())
                screen.say(f"  routes of {model}:\n    {lines}")
            case "step":
                steps[role] = f"{role} {model}: {event['step']}"
                screen.progress(", ".join(steps.values()))
            case "progress":
                what = f"{role} {model}: {event['action']}"
                screen.progress(what, event["done"], event["total"])
            case "result" if role is not Role.PREFILL:
                moved = _sent if role is Role.DECODE else _stored
                screen.say(f"  {model:5} {moved(event['result'])}")

    return show


def _stored(served: Served) -> str:
    moved = sum(pool.loaded_pages for pool in served.pools.values())
    stored = sum(len(pool.stored) for pool in served.pools.values())
    return (
        f"{moved:3} pages loaded, {served.computed_tokens:4} tokens computed, "
        f"{stored:3} pages stored, first token {served.ttft_s:6.3f} s"
    )


def _sent(served: Served) -> str:
    pages = sum(pool.loaded_pages for pool in served.pools.values())
    return (
        f"{pages:4} pages of {', '.join(served.arrived)}: "
        f"{format_bytes(served.arrived_bytes)} in {served.send_s:.3f} s; "
        f"{served.computed_tokens} tokens computed, first token "
        f"{served.ttft_s:.3f} s later"
    )


def outcome(
    results: Sequence[Result], backend: str, reason: str, notice: str
) -> Outcome:
    """Return what a demo has shown.

    Args:
        results: The verdict on each model.
        backend: The backend that was used.
        reason: Why this one.
        notice: What was started for it; "" for nothing.
    """
    if any(Role.OFFLOAD in result.runs for result in results):
        schema, model = "kvdock.demo/1", _stored_model
        tables = [_pools(results), _table(results, (_restored, _altered, _damaged))]
    else:
        schema, model = "kvdock.demo-send/1", _sent_model
        tables = [_table(results, (_pages, _transfer))]
    failed = [
        f"FAILED {result.family}: {check.claim} ({check.detail})"
        for result in results
        for check in result.checks
        if not check.holds
    ]
    data = {
        "schema": schema,
        "ok": not failed,
        "backend": backend,
        "reason": reason,
        "notice": notice,
        "models": [{"model": str(one.family), **model(one)} for one in results],
    }
    return Outcome(tables, failed, data)


def _pools(results: Sequence[Result]) -> Table:
    """Lay out pages and bytes of every pool."""
    rows = [
        (
            result.family,
            name,
            format_bytes(pool.page_bytes),
            str(len(pool.stored)),
            format_bytes(pool.stored_bytes),
            str(restored[name].loaded_pages),
            format_bytes(restored[name].loaded_bytes),
        )
        for result in results
        for restored in [result.runs[Role.RESTORE].pools]
        for name, pool in result.runs[Role.OFFLOAD].pools.items()
    ]
    headings = ("MODEL", "POOL", "PAGE", "STORED", "BYTES", "RESTORED", "BYTES")
    return Table("Pools", headings, rows)


def _table(
    results: Sequence[Result], sections: Iterable[Callable[[Result], Figures]]
) -> Table:
    """Lay out what was compared: a column for each model."""
    rows: list[Sequence[str]] = []
    for figures in sections:
        columns = [dict(figures(result)) for result in results]
        if rows:
            rows.append([""] * (len(results) + 1))
        rows += [
            (row, *(column.get(row, "-") for column in columns))
            for row in dict.fromkeys(row for column in columns for row in column)
        ]
    return Table("Results", ("", *(result.family for result in results)), rows)


def _restored(result: Result) -> Iterator[tuple[str, str]]:
    warm, restored, cold, _ = result.runs.values()
    yield "hit length, tokens", str(restored.loaded_pages * restored.page_tokens)
    yield "first token, restored", f"{restored.ttft_s:.3f} s"
    yield "first token, recomputed", f"{cold.ttft_s:.3f} s"
    yield "restoring is faster by", f"{cold.ttft_s / restored.ttft_s:.0f} x"
    yield "logits off the warm run", f"{result.max_abs_diff:.2g}"
    yield "logits off the recomputed", f"{result.diff_recomputed:.2g}"
    yield "  tolerated", f"{LOGITS_TOLERANCE:.2g}"
    yield "tokens identical", _yes(result.tokens_identical)
    yield from _acceptance("before", warm, "after", restored)


def _altered(result: Result) -> Iterator[tuple[str, str]]:
    for altered in result.runs[Role.RESTORE].altered:
        if altered.draft:
            share = altered.accepted / altered.proposed
            yield f"acceptance, {altered.pool} altered", f"{share:.3f}"
        else:
            yield f"logits off, {altered.pool} altered", f"{altered.max_abs_diff:.2g}"


def _damaged(result: Result) -> Iterator[tuple[str, str]]:
    _, restored, _, repaired = result.runs.values()
    left = f"{repaired.loaded_pages} of {restored.loaded_pages}"
    yield "pages damaged", str(len(result.damage))
    yield "pages of the prefix left", left
    yield "tokens recomputed", str(repaired.computed_tokens)
    yield "damage survived", _yes(result.damage_survived)
    yield "verdict", "ok" if result.ok else "FAILED"


def _pages(result: Result) -> Figures:
    for name, pool in result.runs[Role.DECODE].pools.items():
        yield f"pages of {name}", str(pool.loaded_pages)


def _transfer(result: Result) -> Iterator[tuple[str, str]]:
    prefill, decode = result.runs.values()
    yield "bytes sent", format_bytes(decode.arrived_bytes)
    yield "prefill took", f"{prefill.prefill_s:.3f} s"
    yield "sending took", f"{decode.send_s:.3f} s"
    yield "first token after that", f"{decode.ttft_s:.3f} s"
    yield "logits off one process", f"{result.max_abs_diff:.2g}"
    yield "tokens identical", _yes(result.tokens_identical)
    yield from _acceptance("one process", prefill, "decode", decode)
    yield "verdict", "ok" if result.ok else "FAILED"


def _acceptance(
    first: str, one: Served, second: str, other: Served
) -> Iterator[tuple[str, str]]:
    for where, served in ((first, one), (second, other)):
        if served.acceptance is not None:
            yield f"draft acceptance, {where}", f"{served.acceptance:.3f}"


def _yes(value: bool) -> str:  # noqa: FBT001 - the value to show
    return "yes" if value else "NO"


def _stored_model(result: Result) -> dict[str, object]:
    warm, restored, cold, _ = result.runs.values()
    return {
        "pools": {
            name: {
                "pages": len(pool.stored),
                "bytes": pool.stored_bytes,
                "restored_pages": restored.pools[name].loaded_pages,
                "restored_bytes": restored.pools[name].loaded_bytes,
            }
            for name, pool in warm.pools.items()
        },
        "hit_tokens": restored.loaded_pages * restored.page_tokens,
        "tokens_identical": result.tokens_identical,
        "max_abs_diff": min(result.max_abs_diff, _MOST),
        "ttft_restored_s": round(restored.ttft_s, 4),
        "ttft_recomputed_s": round(cold.ttft_s, 4),
        "draft_acceptance_before": warm.acceptance,
        "draft_acceptance_after": restored.acceptance,
        "damaged_pages": len(result.damage),
        "damage_survived": result.damage_survived,
    }


def _sent_model(result: Result) -> dict[str, object]:
    prefill, decode = result.runs.values()
    return {
        "ok": result.ok,
        "pools": {
            name: {"pages": pool.loaded_pages, "bytes": pool.loaded_bytes}
            for name, pool in decode.pools.items()
        },
        "arrived": list(decode.arrived),
        "arrived_bytes": decode.arrived_bytes,
        "computed_tokens": decode.computed_tokens,
        "tokens_identical": result.tokens_identical,
        "max_abs_diff": min(result.max_abs_diff, _MOST),
        "prefill_s": round(prefill.prefill_s, 4),
        "send_s": round(decode.send_s, 4),
        "first_token_s": round(decode.ttft_s, 4),
        "draft_acceptance_one_process": prefill.acceptance,
        "draft_acceptance_decode": decode.acceptance,
        "failed": [check.claim for check in result.checks if not check.holds],
    }
