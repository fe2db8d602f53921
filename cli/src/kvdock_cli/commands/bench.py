"""The command `kvdock bench`: wiring only."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from kvdock import Backend
from kvdock.self_test import require_ready
from kvdock.units import format_bytes, parse_bytes
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, typed_settings
from kvdock_cli.commands.list import load
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import bench as report

MOST_BYTES = 1 << 30
"""Memory of one figure: all pages of all threads."""


def bench(  # noqa: PLR0913 - what figures depend on
    name: str,
    /,
    *,
    set_: tuple[str, ...] = (),
    page: tuple[str, ...] = ("64 KiB", "256 KiB", "1 MiB"),
    batch: tuple[int, ...] = (1, 32),
    threads: tuple[int, ...] = (1, 4),
    runs: int = 5,
    token_bytes: str = "64 KiB",  # noqa: S107 - KV bytes of a token, no password
    recompute: float = 0.0,
    engine: str = "",
    json: bool = False,
) -> int:
    """Measure how fast a backend stores, finds and loads pages on this machine.

    Pages go the way of an engine's, beside the raw disk or network of the same
    machine. What is stored is removed again. The last lines say when restoring
    is faster than computing a prompt once more.

    Args:
        name: The backend.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        page: Size of a page, such as "256 KiB"; may be given several times.
        batch: Pages of a call; may be given several times.
        threads: Threads that call at once; may be given several times.
        runs: Batches that are timed for each figure, after one that warms up: their
            median counts, and the slowest and fastest are shown.
        token_bytes: KV bytes of one token of the model, for the comparison
            with recomputing.
        recompute: Tokens per second that the engine prefills, if known.
        engine: Measure that instead, on a running engine, such as
            http://127.0.0.1:30000: prompts of random tokens, one new token each.
        json: Print one line of JSON.
    """
    sizes = [parse_bytes(one) for one in page]
    token = parse_bytes(token_bytes)
    if min([*sizes, *batch, *threads, token, runs]) < 1:
        raise UsageProblem("sizes and counts are at least 1")
    if not 0 <= recompute < math.inf:
        raise UsageProblem(f"--recompute {recompute:g} is not a number of tokens")
    if recompute and engine:
        raise UsageProblem(
            "--recompute and --engine say the same", fix="Give one of them."
        )
    shapes = [(size, n, many) for many in threads for n in batch for size in sizes]
    if max(size * n * many for size, n, many in shapes) > MOST_BYTES:
        raise UsageProblem(
            f"a figure would take more than {format_bytes(MOST_BYTES)}",
            fix="Lower --page, --batch or --threads.",
        )
    settings = backend_settings(name, set_)
    found = load({name: settings}, only=name)
    backend = Backend(found.require([name])[name])
    own, path = (
        typed_settings(backend, settings, "bench"),
        backend.manifest.path_setting,
    )
    folder: Path | None = getattr(own, path) if path else None
    require_ready(backend, settings)
    from kvdock_cli.bench import measure, prefill, raw  # noqa: PLC0415 - numpy, 65 ms

    if engine:
        with progress.shown(f"prefill of {engine}", total=prefill.requests()) as bar:
            recompute = prefill.prefill_pace(engine, bar.advance)
    limit = partial(raw.disk, folder) if folder else raw.network
    figures = []
    with progress.shown(f"bench {name}", total=len(shapes)) as bar:
        for size, n, many in shapes:
            bar.note = f"{n} pages of {format_bytes(size)}, {many} threads"
            figures.append(
                measure.measure(backend, settings, size, n, many, limit, runs=runs)
            )
            bar.advance()
    done = report.report(
        name,
        figures,
        raw="disk" if folder else "loopback",
        runs=runs,
        token_bytes=token,
        recompute=recompute,
        recompute_from="engine" if engine else "given" if recompute else "",
    )
    return emit(done, as_json=json)
