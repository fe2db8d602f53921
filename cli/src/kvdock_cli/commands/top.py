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
    url: tuple[str, ...],
    /,
    *,
    interval: float = 2.0,
    once: bool = False,
    json: bool = False,
) -> int:
    """Watch the storage of engines: hits, restored pages, bytes, breakers, fill.

    Reads the metrics that an engine serves for Prometheus. Ends with Ctrl-C. With
    --once it prints what there is since the engine started, and is 1 if a pool is
    not stored, a breaker is not closed, or pages came back wrong.

    Args:
        url: Where engines serve metrics, such as http://127.0.0.1:30000.
        interval: Seconds between two looks.
        once: Print one view and end.
        json: Print one line of JSON, with --once.
    """
    if not 0 < interval <= _LONGEST_S:
        raise UsageProblem(f"--interval {interval:g} is not a time to wait")
    if once:
        views = [report.view_of(one, fetch(one)) for one in url]
        return emit(report.report(views), as_json=json)
    if json or not is_terminal(sys.stdout):
        raise UsageProblem(
            "a live view needs a terminal", fix="Give --once for scripts and pipes."
        )
    looks = {one: (time.monotonic(), fetch(one)) for one in url}
    views = [report.view_of(one, samples) for one, (_, samples) in looks.items()]
    try:
        while True:
            say(_HOME_AND_ERASE + report.report(views).text(style_of()))
            time.sleep(interval)
            last, looks = looks, {one: (time.monotonic(), fetch(one)) for one in url}
            views = [
                report.view_of(one, now, last[one][1], now_s - last[one][0])
                for one, (now_s, now) in looks.items()
            ]
    except KeyboardInterrupt:
        say("")
        return FINE
