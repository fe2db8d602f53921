"""The output of `kvdock doctor`: what is broken, and what probing found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

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


@attrs.frozen
class Section:
    """The findings of one backend, or of one doctor of another distribution."""

    candidate: Candidate
    findings: Sequence[Finding]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    sections: Sequence[Section] = ()
    problems: Sequence[PluginProblem] = ()
    hidden: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems and not self.count("problem")

    def count(self, state: str) -> int:
        """Return how many things are in a state."""
        findings = (one for section in self.sections for one in section.findings)
        return sum(state_of(one) == state for one in findings)


def state_of(finding: Finding) -> str:
    """Return "ok", "warning", "problem" or "skipped"."""
    if not finding.ok:
        return "problem"
    return "skipped" if finding.skipped else "warning" if finding.warning else "ok"


def report(diagnosis: Diagnosis) -> Report:
    """Report the diagnosis, what is broken first."""
    blocks: list[Block] = []
    for problem in diagnosis.problems:
        named = Cell(_titled(problem.group, problem.name) + ": ", Tone.STRONG)
        rows = [
            ("distribution", f"{problem.distribution} {problem.version}"),
            ("entry point", problem.entry_point),
            ("stage", problem.stage),
            ("cause", problem.cause),
            ("fix", problem.fix),
        ]
        blocks += [Text("broken", named), Pairs(rows, indent=2), ""]
    for section in diagnosis.sections:
        of = section.candidate
        named = Cell(_titled(of.group, of.name), Tone.STRONG)
        blocks.append(Text(f" ({of.distribution} {of.version})", named))
        for row in section.findings or [_NOTHING]:
            state = Cell(f"{state_of(row):<{_STATE}}  ", tone_of(state_of(row)))
            blocks.append(Text(row.what, state, indent=2, hanging=len(state.text)))
            if hint := _hint(row):
                blocks.append(Text(hint, indent=_STATE + 4))
        blocks.append("")
    if diagnosis.hidden:
        blocks += [*left_out(diagnosis.hidden)[1:], ""]
    data = {
        "problems": diagnosis.problems,
        "sections": [
            {
                "name": section.candidate.name,
                "group": section.candidate.group,
                "distribution": section.candidate.distribution,
                "version": section.candidate.version,
                "findings": [
                    {"state": state_of(row), "what": row.what, "hint": _hint(row)}
                    for row in section.findings or [_NOTHING]
                ],
            }
            for section in diagnosis.sections
        ],
        "hidden": diagnosis.hidden,
    }
    blocks.append(_verdict(diagnosis))
    return Report("kvdock.doctor/1", data, blocks, diagnosis.ok)


def _hint(finding: Finding) -> str:
    return "" if state_of(finding) == "ok" else finding.hint


def _titled(group: str, name: str) -> str:
    return f"{group.rpartition('.')[2].removesuffix('s')} {name}"


def _verdict(diagnosis: Diagnosis) -> Cell:
    problems = len(diagnosis.problems) + diagnosis.count("problem")
    warnings = diagnosis.count("warning")
    tone = Tone.BAD if problems else Tone.WARNING if warnings else Tone.GOOD
    more = f", {_counted(warnings, 'warning')}" if warnings else ""
    return Cell(f"{_counted(problems, 'problem')}{more} found", tone)


def _counted(count: int, what: str) -> str:
    return f"no {what}" if not count else f"{count} {what}{'s' * (count > 1)}"
