"""The output of `kvdock check`: what holds, what does not, what was not tried."""

from __future__ import annotations

import collections
import re
import signal
from typing import TYPE_CHECKING

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, columns, paragraph, table

if TYPE_CHECKING:
    from kvdock.testing import CheckReport, FinishedRun
    from kvdock_cli.reports._tables import Row

SCHEMA = "kvdock.check/1"

_SHOWN = 4  # cases of one failed test that are named


def as_text(report: CheckReport, who: str, style: Style = PLAIN) -> str:
    """Render the report; it can be pasted as it is."""
    about = dict(report.about) | {"backend": who}
    blocks = [columns(list(about.items()), style), _table(report, style)]
    if report.failed:
        failed = [
            line
            for one in _grouped(report.failed)
            for line in paragraph(one.lstrip(), style, indent=_indent(one), hanging=2)
        ]
        blocks.append([style.paint("FAILED", Tone.BAD), *failed])
    if report.skipped:
        title = style.paint("NOT TRIED", Tone.STRONG)
        blocks.append([title, *_reasons(report.skipped, style)])
    if report.unproven:
        rows = [
            (str(one.claim), one.claim.declared, "; ".join(one.reasons))
            for one in report.unproven
        ]
        title = style.paint("DECLARED, NOT PROVEN", Tone.WARNING)
        blocks.append([title, *columns(rows, style, indent=2)])
    blocks += [_words(report, style), _families(report, style)]
    *before, verdict = _verdict(report)
    tone = Tone.GOOD if report.ok else Tone.BAD
    lines = [line for one in before for line in paragraph(one, style)]
    lines += [style.paint(line, tone) for line in paragraph(verdict, style)]
    blocks.append(lines)
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_data(report: CheckReport, who: str) -> dict[str, object]:
    """Describe the report as data."""
    record = report.record
    return {
        "schema": SCHEMA,
        "ok": report.ok,
        "about": dict(report.about) | {"backend": who},
        "only": report.only,
        "counts": dict(_counts(report)),
        "unproven": [
            {
                "capability": str(one.claim),
                "declared": one.claim.declared,
                "reasons": list(one.reasons),
            }
            for one in report.unproven
        ],
        "words": [
            {
                "word": str(one.claim),
                "declared": one.claim.declared,
                "proof": one.proof.value,
                "reasons": list(one.reasons),
            }
            for one in report.words
        ],
        "routes": [
            {
                "family": route.pool.kind.value,
                "hit_policy": route.pool.hit_policy.value,
                "accepted": bool(route.backend),
                "path": route.mode.value if route.backend else "",
                "reason": route.reason,
            }
            for route in report.routes
        ],
        "died": _death(report),
        "broken": record.broken,
        "tests": [
            {
                "group": report.groups.get(one.name, ""),
                "test": one.name,
                "case": one.case,
                "outcome": one.how,
                "reason": one.why,
                "where": one.where,
                "seconds": one.seconds,
            }
            for one in record.ended
        ],
    }


def _words(report: CheckReport, style: Style) -> list[str]:
    """Say of each word how it ended; those that end alike for one reason in a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in report.words:
        if not one.lacking:
            why = "; ".join(one.reasons)
            alike.setdefault((one.proof.value, why), []).append(str(one.claim))
    rows = [
        (proof, ", ".join(words) + (f": {why}" if why else ""))
        for (proof, why), words in sorted(alike.items())
    ]
    if not rows:
        return []
    title = style.paint("WORDS AND FAULTS", Tone.STRONG)
    return [title, *columns(rows, style, indent=2)]


def _families(report: CheckReport, style: Style) -> list[str]:
    """Say which pools of engines `kvdock route` would give to the backend."""
    rows: list[Row] = []
    for route in report.routes:
        path = (
            Cell(route.mode.value, Tone.GOOD) if route.backend else Cell("not stored")
        )
        family, policy = route.pool.kind.value, route.pool.hit_policy.value
        rows.append((family, policy, path, route.reason))
    headings = ("POOLS OF", "HIT POLICY", "PATH", "WHY")
    return table(headings, rows, style, fold=["WHY"]) if rows else []


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _counts(report: CheckReport) -> collections.Counter[str]:
    counts = collections.Counter(passed=0, failed=0, skipped=0, xfailed=0)
    counts.update(one.how for one in report.record.ended)
    return counts


def _table(report: CheckReport, style: Style) -> list[str]:
    rows: list[Row] = []
    for title in dict.fromkeys(report.groups.values()):
        mine = [
            one
            for one in report.record.ended
            if report.groups.get(one.name, one.suite) == title
        ]
        if mine:
            hows = collections.Counter(one.how for one in mine)
            failed = Cell(str(hows["failed"]), Tone.BAD if hows["failed"] else None)
            rows.append((title, str(hows["passed"]), failed, str(hows["skipped"])))
    headings = ("GROUP", "PASSED", "FAILED", "NOT TRIED")
    return table(headings, rows, style, fold=["GROUP"])


def _grouped(failed: tuple[FinishedRun, ...]) -> list[str]:
    """Name each kind of failure once: what was said, where, and by which tests."""
    lines = []
    alike: dict[tuple[str, ...], list[FinishedRun]] = {}
    for one in failed:
        said = (one.why.splitlines() or [one.raised])[0]
        # Pages, objects and seconds differ from case to case.
        key = (one.raised, one.where, re.sub(r"\S*[0-9]\S*", "N", said))
        alike.setdefault(key, []).append(one)
    for ones in alike.values():
        first = ones[0]
        words = first.why.splitlines() or [first.raised]
        kind = "" if first.raised == "AssertionError" else f"{first.raised}: "
        lines += [f"  {kind}{words[0]}", *(f"    {word}" for word in words[1:6])]
        if first.where:
            lines.append(f"    at {first.where}")
        cases: dict[str, list[str]] = {}
        for one in ones:
            cases.setdefault(one.name, []).append(one.case)
        lines += [_cases(name, mine) for name, mine in cases.items()]
    return lines


def _cases(name: str, cases: list[str]) -> str:
    shown = list(dict.fromkeys(filter(None, cases)))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    listed = f" for {', '.join(shown[:_SHOWN])}{more}" if shown else ""
    return f"    in {name}{listed}"


def _reasons(skipped: tuple[FinishedRun, ...], style: Style) -> list[str]:
    counts = collections.Counter(one.why for one in skipped)
    rows = [(f"{count} x", why) for why, count in sorted(counts.items())]
    return columns(rows, style, indent=2)


def _death(report: CheckReport) -> str:
    record = report.record
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


def _verdict(report: CheckReport) -> list[str]:
    record = report.record
    if record.broken:
        return [f"the tests could not be collected: {record.broken}"]
    if not record.ended and not record.left:
        return ["no test ran", record.said.strip()]
    lines = []
    if record.left:
        died = f"{_death(report)}; {record.left} tests were not run"
        lines = [died, record.said.strip()]
    counts = _counts(report)
    said = ", ".join(
        f"{count} {how.replace('skipped', 'not tried')}"
        for how, count in counts.items()
        if count or how in ("passed", "failed")
    )
    name = report.name
    if report.only:
        does = "passes" if report.ok else "does not pass"
        verdict = (
            f"{name} {does} the tests with {report.only!r} in their names; a run of "
            "all tests is a verdict"
        )
    elif report.unproven and not report.failed:
        lacking = ", ".join(str(one.claim) for one in report.unproven)
        verdict = f"{name} keeps what was tried; declared, not proven: {lacking}"
    else:
        verdict = f"{name} {'keeps' if report.ok else 'does not keep'} what it declares"
    return [*lines, f"{said}: {verdict}"]
