"""What the demo of stored pages prints; knows rich."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kvdock_transformers.demo.damage import Harm
from kvdock_transformers.demo.records import Phase, Served
from kvdock_transformers.demo.trial import Request
from kvdock_transformers.demo.verdicts import LOGITS_TOLERANCE, ModelResult
from kvdock_transformers.families import WORKLOADS

SCHEMA = "kvdock.demo/1"

_TITLES = {
    Phase.OFFLOAD: "Process 1 prefills the prompt, stores its pages, generates",
    Phase.RESTORE: "Process 2 starts clean, restores the pages, generates",
    Phase.RECOMPUTE: "Process 3 recomputes everything without a store",
    Phase.REPAIR: "Process 4 restores what the damage left, recomputes the rest",
}
_KIB = 1024
_WIDTH = 100
"""Columns where the output is not a terminal and says nothing about its width."""


class Display:
    """Shows a trial while it runs, and its results at the end.

    Args:
        to_stderr: Keep standard output free for something else.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False)
        if not self.console.is_terminal:
            self.console.width = _WIDTH
        self._progress = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("pages"),
            TimeElapsedColumn(),
            console=self.console,
            # Lines that stay would be printed twice without a terminal.
            transient=not self.console.is_terminal,
        )
        self._tasks: dict[tuple[object, ...], TaskID] = {}
        self._started_s = time.monotonic()
        self._damaging = False

    def __enter__(self) -> Self:
        """Start the progress bars."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the progress bars."""
        self._progress.stop()

    def begin(self, request: Request, notice: str = "") -> None:
        """Say what is about to be done, and what was started for it."""
        work = WORKLOADS[request.scale]
        self._started_s = time.monotonic()
        self.console.print(
            f"Models {', '.join(request.families)}: random weights, made here. "
            f"Backend {request.backend}.\n"
            f"Prompt of {work.prompt_tokens} tokens: "
            f"{work.prefix_pages} pages of {work.page_tokens}, and a tail."
        )
        if notice:
            self.console.print(f"{notice[0].upper()}{notice[1:]}.", markup=False)

    def show(self, event: Mapping[str, Any]) -> None:
        """Show one event of a trial."""
        match event["event"]:
            case "start":
                phase = Phase(event["phase"])
                self.console.print(f"\n[bold]{_TITLES[phase]}[/bold]")
                self.console.print(f"  pid {event['pid']}")
            case "plan" if event["phase"] is Phase.OFFLOAD:
                self.console.print(f"  routes of {event['model']}:")
                for line in event["text"].splitlines():
                    self.console.print(f"    {line}", markup=False, soft_wrap=True)
            case "progress":
                self._bar(event)
            case "result":
                self._serving(event)
            case "damage":
                done = ", ".join(
                    f"{pool} {page} {_PAST[harm]}"
                    for pool, page, harm in event["damage"].done
                )
                if not self._damaging:
                    self.console.print("\n[bold]Stored pages are damaged[/bold]")
                    self._damaging = True
                self.console.print(f"  {event['model']:5} {done}")

    def _bar(self, event: Mapping[str, Any]) -> None:
        key = (event["phase"], event["model"], event["action"])
        if not event["total"]:
            return
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(
                f"{event['model']:5} {event['action']:5}", total=event["total"]
            )
        self._progress.update(self._tasks[key], completed=event["done"])

    def _serving(self, event: Mapping[str, Any]) -> None:
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks.clear()
        served = Served(**event["result"])
        moved = sum(pool.loaded_pages for pool in served.pools.values())
        stored = sum(len(pool.stored) for pool in served.pools.values())
        self.console.print(
            f"  {event['model']:5} {moved:3} pages loaded, "
            f"{served.computed_tokens:4} tokens computed, "
            f"{stored:3} pages stored, first token {served.ttft_s:6.3f} s"
        )

    def end(self, results: Sequence[ModelResult]) -> None:
        """Print the tables, and every claim that did not hold."""
        self.console.print()
        self.console.print(pool_table(results))
        self.console.print(result_table(results))
        for result in results:
            for check in result.checks:
                if not check.holds:
                    self.console.print(
                        f"FAILED {result.family}: {check.claim} ({check.detail})",
                        style="bold red",
                        markup=False,
                    )
        verdict = "all as it should be" if all(r.ok for r in results) else "FAILED"
        seconds = time.monotonic() - self._started_s
        self.console.print(f"{verdict}, {seconds:.0f} s in all")


_PAST = {
    Harm.FLIP: "flipped",
    Harm.TRUNCATE: "truncated",
    Harm.DELETE: "deleted",
    Harm.EXTEND: "extended",
}


def pool_table(results: Sequence[ModelResult]) -> Table:
    """Lay out pages and bytes of every pool."""
    table = Table(title="Pools", title_justify="left")
    for heading in ("model", "pool"):
        table.add_column(heading)
    for heading in ("page", "pages stored", "", "restored", ""):
        table.add_column(heading, justify="right")
    for result in results:
        restored = result.runs[Phase.RESTORE].pools
        for name, pool in result.runs[Phase.OFFLOAD].pools.items():
            table.add_row(
                result.family,
                name,
                _size(pool.page_bytes),
                str(len(pool.stored)),
                _size(pool.stored_bytes),
                str(restored[name].loaded_pages),
                _size(restored[name].loaded_bytes),
            )
    return table


def result_table(results: Sequence[ModelResult]) -> Table:
    """Lay out what was compared: a column for each model."""
    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.family, justify="right")
    for figures in (_restored, _altered, _damaged):
        columns = [dict(figures(result)) for result in results]
        for row in dict.fromkeys(row for column in columns for row in column):
            table.add_row(row, *(column.get(row, "-") for column in columns))
        table.add_section()
    return table


def _restored(result: ModelResult) -> Iterator[tuple[str, str]]:
    warm, restored, cold, _ = (result.runs[phase] for phase in Phase)
    yield "hit length, tokens", str(restored.loaded_pages * restored.page_tokens)
    yield "first token, restored", f"{restored.ttft_s:.3f} s"
    yield "first token, recomputed", f"{cold.ttft_s:.3f} s"
    yield "restoring is faster by", f"{cold.ttft_s / restored.ttft_s:.0f} x"
    yield "logits off the warm run", f"{result.diff_warm:.2g}"
    yield "logits off the recomputed", f"{result.diff_recomputed:.2g}"
    yield "  tolerated", f"{LOGITS_TOLERANCE:.2g}"
    yield "tokens identical", _yes(result.tokens_identical)
    if warm.acceptance is not None and restored.acceptance is not None:
        yield "draft acceptance before", f"{warm.acceptance:.3f}"
        yield "draft acceptance after", f"{restored.acceptance:.3f}"


def _altered(result: ModelResult) -> Iterator[tuple[str, str]]:
    for altered in result.runs[Phase.RESTORE].altered:
        if altered.draft:
            share = altered.accepted / altered.proposed
            yield f"acceptance, {altered.pool} altered", f"{share:.3f}"
        else:
            yield f"logits off, {altered.pool} altered", f"{altered.max_abs_diff:.2g}"


def _damaged(result: ModelResult) -> Iterator[tuple[str, str]]:
    _, restored, _, repaired = (result.runs[phase] for phase in Phase)
    yield "pages damaged", str(len(result.damage.done))
    yield (
        "pages of the prefix left",
        f"{repaired.loaded_pages} of {restored.loaded_pages}",
    )
    yield "tokens recomputed", str(repaired.computed_tokens)
    yield "damage survived", _yes(result.damage_survived)
    yield "verdict", "[green]ok[/green]" if result.ok else "[red]FAILED[/red]"


def as_object(results: Sequence[ModelResult]) -> str:
    """Render results as one line of JSON.

    `max_abs_diff` is that of restored logits from the warm run's.
    """
    return json.dumps(
        {
            "schema": SCHEMA,
            "ok": all(r.ok for r in results),
            "models": [_model(r) for r in results],
        }
    )


def _model(result: ModelResult) -> dict[str, object]:
    warm, restored, cold, _ = (result.runs[phase] for phase in Phase)
    return {
        "model": str(result.family),
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
        "max_abs_diff": result.diff_warm,
        "ttft_restored_s": round(restored.ttft_s, 4),
        "ttft_recomputed_s": round(cold.ttft_s, 4),
        "draft_acceptance_before": warm.acceptance,
        "draft_acceptance_after": restored.acceptance,
        "damaged_pages": len(result.damage.done),
        "damage_survived": result.damage_survived,
    }


def _yes(value: bool) -> str:  # noqa: FBT001 - the value to show
    return "yes" if value else "[red]NO[/red]"


def _size(nbytes: int) -> str:
    if nbytes < _KIB * _KIB:
        return f"{nbytes / _KIB:.1f} KiB"
    return f"{nbytes / _KIB / _KIB:.1f} MiB"
