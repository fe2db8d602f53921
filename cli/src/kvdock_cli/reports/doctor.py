"""The output of `kvdock doctor`: what is broken, and what probing found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import Finding
from kvdock_cli.reports._report import Block, Pairs, Report, Text
from kvdock_cli.reports._style import Tone, tone_of
from kvdock_cli.reports._tables import Cell
from kvdock_cli.reports.list import left_out

if TYPE_CHECKING:
    from kvdock import PluginProblem
    from kvdock.plugin import Candidate

_STATE = 7  # columns of the longest state
_NOTHING = Finding(ok=True, what="nothing to complain of")


Section = tuple["Candidate", Sequence[Finding]]
"""The findings of one backend, or of one doctor of another distribution."""


def state_of(finding: Finding) -> str:
    """Return "ok", "warning", "problem" or "skipped"."""
    if not finding.ok:
        return "problem"
    return "skipped" if finding.skipped else "warning" if finding.warning else "ok"


def report(
    sections: Sequence[Section] = (),
    problems: Sequence[PluginProblem] = (),
    hidden: Sequence[str] = (),
) -> Report:
    """Report a diagnosis, what is broken first; `hidden` is what is not allowed."""
    blocks: list[Block] = []
    for problem in problems:
        named = Cell(_titled(problem.group, problem.name) + ": ", Tone.STRONG)
        rows = [
            ("distribution", f"{problem.distribution} {problem.version}"),
            ("entry point", problem.entry_point),
            ("stage", problem.stage),
            ("cause", problem.cause),
            ("fix", problem.fix),
        ]
        blocks += [Text("broken", named), Pairs(rows, indent=2), ""]
    for of, findings in sections:
        named = Cell(_titled(of.group, of.name), Tone.STRONG)
        blocks.append(Text(f" ({of.distribution} {of.version})", named))
        for row in findings or [_NOTHING]:
            state = Cell(f"{state_of(row):<{_STATE}}  ", tone_of(state_of(row)))
            blocks.append(Text(row.what, state, indent=2, hanging=len(state.text)))
            if hint := _hint(row):
                blocks.append(Text(hint, indent=_STATE + 4))
        blocks.append("")
    if hidden:
        blocks += [*left_out(hidden)[1:], ""]
    data = {
        "problems": problems,
        "sections": [
            {
                "name": of.name,
                "group": of.group,
                "distribution": of.distribution,
                "version": of.version,
                "findings": [
                    {"state": state_of(row), "what": row.what, "hint": _hint(row)}
                    for row in findings or [_NOTHING]
                ],
            }
            for of, findings in sections
        ],
        "hidden": hidden,
    }
    states = Counter(state_of(row) for _, findings in sections for row in findings)
    wrong = len(problems) + states["problem"]
    blocks.append(_verdict(wrong, states["warning"]))
    return Report("kvdock.doctor/1", data, blocks, not wrong)


def _hint(finding: Finding) -> str:
    return "" if state_of(finding) == "ok" else finding.hint


def _titled(group: str, name: str) -> str:
    return f"{group.rpartition('.')[2].removesuffix('s')} {name}"


def _verdict(problems: int, warnings: int) -> Cell:
    tone = Tone.BAD if problems else Tone.WARNING if warnings else Tone.GOOD
    more = f", {_counted(warnings, 'warning')}" if warnings else ""
    return Cell(f"{_counted(problems, 'problem')}{more} found", tone)


def _counted(count: int, what: str) -> str:
    return f"no {what}" if not count else f"{count} {what}{'s' * (count > 1)}"
