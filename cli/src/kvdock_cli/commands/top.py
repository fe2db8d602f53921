"""The command `kvdock top`: wiring only."""

from __future__ import annotations

import sys
import time

from kvdock_cli.exposition import fetch
from kvdock_cli.output import FINE, UsageProblem, emit, say
from kvdock_cli.reports import top as report
from kvdock_cli.terminal import is_terminal, style_of

_HOME_AND_ERASE = "\x1b[H\x1b[J"
_LONGEST_S = 3600.0


def top(
    url: str, /, *, interval: float = 2.0, once: bool = False, json: bool = False
) -> int:
    """Watch an engine's storage: hits, restored pages, bytes, breakers, fill.

    Reads the metrics that the engine serves for Prometheus. Ends with Ctrl-C. With
    --once it prints what there is since the engine started, and is 1 if a pool is
    not stored, a breaker is not closed, or pages came back wrong.

    Args:
        url: Where the engine serves metrics, such as http://127.0.0.1:30000.
        interval: Seconds between two looks.
        once: Print one view and end.
        json: Print one line of JSON, with --once.
    """
    if not 0 < interval <= _LONGEST_S:
        raise UsageProblem(f"--interval {interval:g} is not a time to wait")
    if once:
        view = report.view_of(url, fetch(url))
        return emit(
            report.as_text(view, style_of()), report.as_data(view), as_json=json
        )
    if json or not is_terminal(sys.stdout):
        raise UsageProblem(
            "a live view needs a terminal", fix="Give --once for scripts and pipes."
        )
    before, before_s = fetch(url), time.monotonic()
    view = report.view_of(url, before)
    try:
        while True:
            say(_HOME_AND_ERASE + report.as_text(view, style_of()))
            time.sleep(interval)
            now, now_s = fetch(url), time.monotonic()
            view = report.view_of(url, now, before, now_s - before_s)
            before, before_s = now, now_s
    except KeyboardInterrupt:
        say("")
        return FINE
