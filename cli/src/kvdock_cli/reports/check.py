"""What `kvdock check` says: what holds, what does not, what was not tried."""

from __future__ import annotations

import collections
import signal
from typing import TYPE_CHECKING

from kvdock_cli.reports._tables import columns

if TYPE_CHECKING:
    from kvdock.testing.report import Checkup
    from kvdock.testing.subprocess import Ended

SCHEMA = "kvdock.check/1"

_SHOWN = 4  # cases of one failed test that are named


def as_text(checkup: Checkup, who: str) -> str:
    """Render the report; it can be pasted as it is."""
    about = dict(checkup.about) | {"backend": who}
    blocks = [columns(list(about.items())), _table(checkup)]
    if checkup.failed:
        blocks.append(["FAILED", *_grouped(checkup.failed)])
    if checkup.skipped:
        blocks.append(["NOT TRIED", *_reasons(checkup.skipped)])
    blocks.append(_verdict(checkup))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_data(checkup: Checkup, who: str) -> dict[str, object]:
    """Describe the report as data."""
    record = checkup.record
    return {
        "schema": SCHEMA,
        "ok": checkup.ok,
        "about": dict(checkup.about) | {"backend": who},
        "counts": dict(_counts(checkup)),
        "died": _death(checkup),
        "broken": record.broken,
        "tests": [
            {
                "group": checkup.groups.get(one.name, ""),
                "test": one.name,
                "case": one.case,
                "outcome": one.how,
                "reason": one.why,
                "seconds": one.seconds,
            }
            for one in record.ended
        ],
    }


def _counts(checkup: Checkup) -> collections.Counter[str]:
    counts = collections.Counter(passed=0, failed=0, skipped=0, xfailed=0)
    counts.update(one.how for one in checkup.record.ended)
    return counts


def _table(checkup: Checkup) -> list[str]:
    rows: list[tuple[str, ...]] = [("GROUP", "PASSED", "FAILED", "NOT TRIED")]
    for title in dict.fromkeys(checkup.groups.values()):
        mine = [one for one in checkup.record.ended if _group(checkup, one) == title]
        if mine:
            hows = collections.Counter(one.how for one in mine)
            numbers = (str(hows[how]) for how in ("passed", "failed", "skipped"))
            rows.append((title, *numbers))
    return columns(rows) if len(rows) > 1 else []


def _group(checkup: Checkup, one: Ended) -> str:
    return checkup.groups.get(one.name, one.suite)


def _grouped(failed: tuple[Ended, ...]) -> list[str]:
    """Name each failed test once, with its cases and what was first said."""
    lines = []
    by_name: dict[str, list[Ended]] = {}
    for one in failed:
        by_name.setdefault(one.name, []).append(one)
    for name, cases in by_name.items():
        lines.append(f"  {name}")
        shown = list(dict.fromkeys(one.case for one in cases if one.case))
        if shown:
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            lines.append(f"    for {', '.join(shown[:_SHOWN])}{more}")
        words = cases[0].why.splitlines() or [cases[0].raised]
        kind = "" if cases[0].raised == "AssertionError" else f"{cases[0].raised}: "
        lines += [f"    {kind}{words[0]}", *(f"    {word}" for word in words[1:6])]
    return lines


def _reasons(skipped: tuple[Ended, ...]) -> list[str]:
    counts = collections.Counter(one.why for one in skipped)
    rows = [(f"{count} x", why) for why, count in sorted(counts.items())]
    return [f"  {line}" for line in columns(rows)]


def _death(checkup: Checkup) -> str:
    record = checkup.record
    if record.broken or (record.planned and not record.left):
        return ""
    how = f"ended with status {record.status}"
    if record.status < 0:
        how = f"was ended by {signal.Signals(-record.status).name}"
    if record.unfinished:
        return f"the process {how} in {record.unfinished.rpartition('::')[2]}"
    if record.ended:
        return f"the process {how} after {record.ended[-1].name}"
    return f"the process {how} before the first test"


def _verdict(checkup: Checkup) -> list[str]:
    record = checkup.record
    if record.broken:
        return [f"the tests could not be collected: {record.broken}"]
    if not record.ended and not record.left:
        return ["no test ran", record.said.strip()]
    lines = []
    if record.left:
        died = f"{_death(checkup)}; {record.left} tests were not run"
        lines = [died, record.said.strip()]
    counts = _counts(checkup)
    said = ", ".join(
        f"{count} {how.replace('skipped', 'not tried')}"
        for how, count in counts.items()
        if count or how in ("passed", "failed")
    )
    keeps = "keeps" if checkup.ok else "does not keep"
    return [*lines, f"{said}: {checkup.name} {keeps} what it declares"]
