"""What the demo of direct transfer prints; knows rich."""

import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from kvdock_transformers.demo.send.choice import Choice
from kvdock_transformers.demo.send.records import Generated, Role
from kvdock_transformers.demo.send.trial import SendRequest
from kvdock_transformers.demo.send.verdicts import SendResult
from kvdock_transformers.families import WORKLOADS

SCHEMA = "kvdock.demo-send/1"

_MIB = 1 << 20
_WIDTH = 100
"""Columns where the output is not a terminal and says nothing about its width."""


class SendDisplay:
    """Shows what both processes do, and the results at the end.

    Args:
        to_stderr: Keep standard output free for something else.
    """

    def __init__(self, *, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False)
        if not self.console.is_terminal:
            self.console.width = _WIDTH
        self._status = self.console.status("starting both processes")
        self._steps: dict[Role, str] = {}
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        """Show what happens, where this is a terminal."""
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show it no longer."""
        self._status.stop()

    def begin(self, request: SendRequest, choice: Choice, notice: str) -> None:
        """Say what is about to be done, with which backend and why."""
        work = WORKLOADS[request.scale]
        self._started_s = time.monotonic()
        self.console.print(
            f"Models {', '.join(request.families)}: random weights, made here.\n"
            f"Prompt of {work.prompt_tokens} tokens: "
            f"{work.prefix_pages} pages of {work.page_tokens}, and a tail.\n"
            f"Backend {choice.backend}: {choice.reason}.",
            markup=False,
        )
        if notice:
            self.console.print(f"{notice[0].upper()}{notice[1:]}.", markup=False)
        self.console.print(
            "\n[bold]One process prefills and sends, another one decodes[/bold]"
        )

    def show(self, event: Mapping[str, Any]) -> None:
        """Show one event of a process."""
        role = event["role"]
        match event["event"]:
            case "start":
                self.console.print(f"  {role} has pid {event['pid']}")
            case "step":
                self._steps[role] = f"{role} {event['model']}: {event['step']}"
                self._status.update(", ".join(self._steps.values()))
            case "result" if role is Role.DECODE:
                self._arrived(Generated(**event["result"]))

    def _arrived(self, made: Generated) -> None:
        pages = sum(pool.pages for pool in made.pools.values())
        self.console.print(
            f"  {made.family:5} {pages:4} pages of {', '.join(made.arrived)}: "
            f"{_mib(made.arrived_bytes)} in {made.send_s:.3f} s; "
            f"{made.computed_tokens} tokens computed, first token "
            f"{made.first_token_s:.3f} s later"
        )

    def end(self, results: Sequence[SendResult]) -> None:
        """Print the table, and every claim that did not hold."""
        self.console.print()
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


def result_table(results: Sequence[SendResult]) -> Table:
    """Lay out what was compared: a column for each model."""
    table = Table(title="Results", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.family, justify="right")
    for figures in (_pages, _figures):
        columns = [dict(figures(result)) for result in results]
        for row in dict.fromkeys(row for column in columns for row in column):
            table.add_row(row, *(column.get(row, "-") for column in columns))
        table.add_section()
    return table


def _pages(result: SendResult) -> list[tuple[str, str]]:
    pools = result.decode.pools.items()
    return [(f"pages of {name}", str(one.pages)) for name, one in pools]


def _figures(result: SendResult) -> list[tuple[str, str]]:
    prefill, decode = result.prefill, result.decode
    rows = [
        ("bytes sent", _mib(decode.arrived_bytes)),
        ("prefill took", f"{prefill.prefill_s:.3f} s"),
        ("sending took", f"{decode.send_s:.3f} s"),
        ("first token after that", f"{decode.first_token_s:.3f} s"),
        ("logits off one process", f"{result.max_abs_diff:.2g}"),
        ("tokens identical", "yes" if result.tokens_identical else "[red]NO[/red]"),
    ]
    if prefill.acceptance is not None and decode.acceptance is not None:
        rows.append(("draft acceptance, one process", f"{prefill.acceptance:.3f}"))
        rows.append(("draft acceptance, decode", f"{decode.acceptance:.3f}"))
    verdict = "[green]ok[/green]" if result.ok else "[red]FAILED[/red]"
    return [*rows, ("verdict", verdict)]


def as_object(results: Sequence[SendResult], choice: Choice, notice: str) -> str:
    """Render results as one line of JSON."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "ok": all(result.ok for result in results),
            "backend": choice.backend,
            "reason": choice.reason,
            "notice": notice,
            "models": [_model(result) for result in results],
        }
    )


def _model(result: SendResult) -> dict[str, object]:
    prefill, decode = result.prefill, result.decode
    return {
        "model": str(result.family),
        "ok": result.ok,
        "pools": {
            name: {"pages": pool.pages, "bytes": pool.nbytes}
            for name, pool in decode.pools.items()
        },
        "arrived": list(decode.arrived),
        "arrived_bytes": decode.arrived_bytes,
        "computed_tokens": decode.computed_tokens,
        "tokens_identical": result.tokens_identical,
        # JSON has no infinity.
        "max_abs_diff": min(result.max_abs_diff, 1e300),
        "prefill_s": round(prefill.prefill_s, 4),
        "send_s": round(decode.send_s, 4),
        "first_token_s": round(decode.first_token_s, 4),
        "draft_acceptance_one_process": prefill.acceptance,
        "draft_acceptance_decode": decode.acceptance,
        "failed": [check.claim for check in result.checks if not check.holds],
    }


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB"
