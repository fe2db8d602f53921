"""The command `kvdock top`: wiring only."""

from __future__ import annotations

import sys
import time

from kvdock.errors import KvdockError, SettingsError
from kvdock_cli.exposition import Samples, fetch
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
    not stored, a breaker is not closed, pages came back wrong, or one of several
    engines does not answer.

    Args:
        url: Where engines serve metrics, such as http://127.0.0.1:30000.
        interval: Seconds between two looks.
        once: Print one view and end.
        json: Print one line of JSON, with --once.
    """
    if not 0 < interval <= _LONGEST_S:
        raise UsageProblem(f"--interval {interval:g} is not a time to wait")
    if not once and (json or not is_terminal(sys.stdout)):
        raise UsageProblem(
            "a live view needs a terminal", fix="Give --once for scripts and pipes."
        )
    looks = [_look(one) for one in url]
    if all(one.error for one in looks):
        fetch(url[0])  # and let it say what is wrong
    views = [report.view_of(one) for one in looks]
    if once:
        return emit(report.report(views), as_json=json)
    try:
        while True:
            say(_HOME_AND_ERASE + report.report(views).text(style_of()))
            time.sleep(interval)
            last, looks = looks, [_look(one) for one in url]
            views = [*map(report.view_of, looks, last)]
    except KeyboardInterrupt:
        say("")
        return FINE


def _look(url: str) -> report.Look:
    """Ask an engine; one that does not answer ends no view of the others."""
    try:
        return report.Look(url, time.monotonic(), fetch(url))
    except SettingsError:
        raise
    except KvdockError as error:
        return report.Look(url, time.monotonic(), Samples(""), str(error))
