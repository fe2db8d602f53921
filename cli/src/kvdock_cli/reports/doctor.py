"""The output of `kvdock doctor`: what is broken, and what probing found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._report import Block, Pairs, Report, Text
from kvdock_cli.reports._style import Tone, tone_of
from kvdock_cli.reports._tables import Cell
from kvdock_cli.reports.list import left_out

if TYPE_CHECKING:
    from kvdock import Finding, PluginProblem
    from kvdock.plugin import Candidate

_STATE = 7  # columns of the longest state


class State(StrEnum):
    """The result of examining one thing."""

    OK = "ok"
    """As it should be."""
    WARNING = "warning"
    """It works, and deserves attention."""
    PROBLEM = "problem"
    """Not as it should be."""
    SKIPPED = "skipped"
    """Not looked at; the sentence says why."""


@attrs.frozen
class Row:
    """One thing that was looked at."""

    state: State
    what: str
    hint: str = ""


@attrs.frozen
class Section:
    """The findings of one backend, or of one doctor of another distribution."""

    candidate: Candidate
    rows: Sequence[Row]


@attrs.frozen(kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    sections: Sequence[Section] = ()
    problems: Sequence[PluginProblem] = ()
    hidden: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.problems and not self.count(State.PROBLEM)

    def count(self, state: State) -> int:
        """Return how many things are in a state."""
        return sum(
            row.state is state for section in self.sections for row in section.rows
        )


def rows_of(findings: Iterable[Finding]) -> tuple[Row, ...]:
    """Turn findings into rows; an examination without any says so."""
    found = tuple(
        Row(_state(one), one.what, "" if _state(one) is State.OK else one.hint)
        for one in findings
    )
    return found or (Row(State.OK, "nothing to complain of"),)


def _state(finding: Finding) -> State:
    if not finding.ok:
        return State.PROBLEM
    worth = State.WARNING if finding.warning else State.OK
    return State.SKIPPED if finding.skipped else worth


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
        for row in section.rows:
            state = Cell(f"{row.state:<{_STATE}}  ", tone_of(row.state))
            blocks.append(Text(row.what, state, indent=2, hanging=len(state.text)))
            blocks += [Text(row.hint, indent=_STATE + 4)] if row.hint else []
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
                "findings": section.rows,
            }
            for section in diagnosis.sections
        ],
        "hidden": diagnosis.hidden,
    }
    blocks.append(_verdict(diagnosis))
    return Report("kvdock.doctor/1", data, blocks, diagnosis.ok)


def _titled(group: str, name: str) -> str:
    return f"{group.rpartition('.')[2].removesuffix('s')} {name}"


def _verdict(diagnosis: Diagnosis) -> Cell:
    problems = len(diagnosis.problems) + diagnosis.count(State.PROBLEM)
    warnings = diagnosis.count(State.WARNING)
    tone = Tone.BAD if problems else Tone.WARNING if warnings else Tone.GOOD
    more = f", {_counted(warnings, 'warning')}" if warnings else ""
    return Cell(f"{_counted(problems, 'problem')}{more} found", tone)


def _counted(count: int, what: str) -> str:
    return f"no {what}" if not count else f"{count} {what}{'s' * (count > 1)}"
