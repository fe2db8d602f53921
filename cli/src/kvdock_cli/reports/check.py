"""The output of `kvdock check`: what holds, what does not, what was not tried."""

from __future__ import annotations

import collections
import re
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvdock_cli.reports._report import Block, Column, Pairs, Report, Table, Text
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell

if TYPE_CHECKING:
    from kvdock.testing import CheckReport, FinishedRun
    from kvdock_cli.reports._tables import Row

_SHOWN = 4  # cases of one failed test that are named


_GROUPS = (
    Column("GROUP", fold=True),
    Column("PASSED"),
    Column("FAILED"),
    Column("NOT TRIED"),
)
_FAMILIES = (
    Column("POOLS OF", lambda route: route.pool.kind.value),
    Column("HIT POLICY", lambda route: route.pool.hit_policy.value),
    Column(
        "PATH",
        lambda route: (
            Cell(route.mode.value, Tone.GOOD) if route.backend else Cell("not stored")
        ),
    ),
    Column("WHY", "reason", fold=True),
)


def report(found: CheckReport, who: str) -> Report:
    """Report what holds; the text can be pasted as it is."""
    about = dict(found.about) | {"backend": who}
    skipped = collections.Counter(one.why for one in found.skipped)
    unproven = [
        (str(one.claim), one.claim.declared, "; ".join(one.reasons))
        for one in found.unproven
    ]
    titled = {
        Cell("FAILED", Tone.BAD): _grouped(found.failed),
        Cell("NOT TRIED", Tone.STRONG): _pairs(
            [(f"{count} x", why) for why, count in sorted(skipped.items())]
        ),
        Cell("DECLARED, NOT PROVEN", Tone.WARNING): _pairs(unproven),
        Cell("WORDS AND FAULTS", Tone.STRONG): _pairs(_words(found)),
    }
    parts: list[list[Block]] = [
        [Pairs(list(about.items()))],
        [Table(_GROUPS, _groups(found))],
    ]
    parts += [[title, *lines] for title, lines in titled.items() if lines]
    parts.append([Table(_FAMILIES, found.routes)] if found.routes else [])
    *before, verdict = _verdict(found)
    parts.append([*before, Cell(verdict, Tone.GOOD if found.ok else Tone.BAD)])
    blocks = [block for part in parts if part for block in ("", *part)]
    return Report("kvdock.check/1", _data(found, about), blocks[1:], found.ok)


def _data(found: CheckReport, about: Mapping[str, str]) -> dict[str, object]:
    return {
        "about": about,
        "only": found.only,
        "quick": found.quick,
        "evidence": dict(found.evidence),
        "counts": dict(_counts(found)),
        "unproven": [
            {
                "capability": str(one.claim),
                "declared": one.claim.declared,
                "reasons": one.reasons,
            }
            for one in found.unproven
        ],
        "words": [
            {
                "word": str(one.claim),
                "declared": one.claim.declared,
                "proof": one.proof.value,
                "reasons": one.reasons,
            }
            for one in found.words
        ],
        "routes": [
            {
                "family": route.pool.kind.value,
                "hit_policy": route.pool.hit_policy.value,
                "accepted": bool(route.backend),
                "path": route.mode.value if route.backend else "",
                "reason": route.reason,
            }
            for route in found.routes
        ],
        "died": _death(found),
        "broken": found.record.broken,
        "tests": [
            {
                "group": found.groups.get(one.name, ""),
                "test": one.name,
                "case": one.case,
                "outcome": one.how,
                "reason": one.why,
                "where": one.where,
                "seconds": one.seconds,
            }
            for one in found.record.ended
        ],
    }


def _pairs(rows: Sequence[Row]) -> list[Block]:
    return [Pairs(rows, indent=2)] if rows else []


def _words(found: CheckReport) -> list[Row]:
    """Say of each word how it ended; those that end alike for one reason in a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in found.words:
        if not one.lacking:
            why = "; ".join(one.reasons)
            alike.setdefault((one.proof.value, why), []).append(str(one.claim))
    return [
        (proof, ", ".join(words) + (f": {why}" if why else ""))
        for (proof, why), words in sorted(alike.items())
    ]


def _counts(found: CheckReport) -> collections.Counter[str]:
    counts = collections.Counter(passed=0, failed=0, skipped=0, xfailed=0)
    counts.update(one.how for one in found.record.ended)
    return counts


def _groups(found: CheckReport) -> list[Row]:
    groups: dict[str, collections.Counter[str]] = {}
    for one in found.record.ended:
        title = found.groups.get(one.name, one.suite)
        groups.setdefault(title, collections.Counter())[one.how] += 1
    return [
        (
            title,
            str(groups[title]["passed"]),
            Cell(str(failed := groups[title]["failed"]), Tone.BAD if failed else None),
            str(groups[title]["skipped"]),
        )
        for title in dict.fromkeys(found.groups.values())
        if title in groups
    ]


def _grouped(failed: Sequence[FinishedRun]) -> list[Block]:
    """Name each kind of failure once: what was said, where, and by which tests."""
    blocks: list[Block] = []
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
        cases: dict[str, list[str]] = {}
        for one in ones:
            cases.setdefault(one.name, []).append(one.case)
        where = [f"at {first.where}"] if first.where else []
        below = [*words[1:6], *where, *(_cases(*pair) for pair in cases.items())]
        blocks.append(Text(kind + words[0], indent=2))
        blocks += [Text(line, indent=4) for line in below]
    return blocks


def _cases(name: str, cases: list[str]) -> str:
    shown = list(dict.fromkeys(filter(None, cases)))
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    listed = f" for {', '.join(shown[:_SHOWN])}{more}" if shown else ""
    return f"in {name}{listed}"


def _death(report: CheckReport) -> str:
    record = report.record
    if record.broken or (record.planned and not record.left):
        return ""
    how, where = f"ended with status {record.status}", "before the first test"
    if record.status < 0:
        how = f"was ended by {signal.Signals(-record.status).name}"
    if record.unfinished:
        where = f"in {record.unfinished.rpartition('::')[2]}"
    elif record.ended:
        where = f"after {record.ended[-1].name}"
    return f"the process {how} {where}"


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
    if report.only or report.quick:
        does = "passes" if report.ok else "does not pass"
        which = "quick " * report.quick + "tests"
        which += f" with {report.only!r} in their names" * bool(report.only)
        verdict = f"{name} {does} the {which}; a run of all tests is a verdict"
    elif report.unproven and not report.failed:
        lacking = ", ".join(str(one.claim) for one in report.unproven)
        verdict = f"{name} keeps what was tried; declared, not proven: {lacking}"
    else:
        verdict = f"{name} {'keeps' if report.ok else 'does not keep'} what it declares"
    return [*lines, f"{said}: {verdict}"]
