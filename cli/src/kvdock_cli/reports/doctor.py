"""The output of `kvdock doctor`: what is broken, and what probing found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._style import PLAIN, Style, Tone, tone_of
from kvdock_cli.reports._tables import columns, paragraph, plain

if TYPE_CHECKING:
    from kvdock import Finding, PluginProblem
    from kvdock.plugin import Candidate

SCHEMA = "kvdock.doctor/1"
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
        Row(_state(one), one.what, one.hint if one.warning or not one.ok else "")
        for one in findings
    )
    return found or (Row(State.OK, "nothing to complain of"),)


def _state(finding: Finding) -> State:
    if not finding.ok:
        return State.PROBLEM
    return State.WARNING if finding.warning else State.OK


def as_text(diagnosis: Diagnosis, style: Style = PLAIN) -> str:
    """Render the diagnosis, what is broken first."""
    blocks = [_problem(problem, style) for problem in diagnosis.problems]
    blocks += [_section(section, style) for section in diagnosis.sections]
    if diagnosis.hidden:
        hidden = (
            f"Left out by KVDOCK_PLUGINS or KVDOCK_DENY: {', '.join(diagnosis.hidden)}"
        )
        blocks.append(paragraph(hidden, style, hanging=2))
    blocks.append([_verdict(diagnosis, style)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict(diagnosis: Diagnosis, style: Style) -> str:
    problems = len(diagnosis.problems) + diagnosis.count(State.PROBLEM)
    warnings = diagnosis.count(State.WARNING)
    tone = Tone.BAD if problems else Tone.WARNING if warnings else Tone.GOOD
    found = [_counted(problems, "problem")]
    if warnings:
        found.append(_counted(warnings, "warning"))
    return style.paint(f"{', '.join(found)} found", tone)


def _counted(count: int, what: str) -> str:
    return f"no {what}" if not count else f"{count} {what}{'s' * (count > 1)}"


def _problem(problem: PluginProblem, style: Style) -> list[str]:
    what = problem.group.rpartition(".")[2].removesuffix("s")
    name = style.paint(f"{what} {problem.name}", Tone.STRONG)
    return [
        f"{name}: {style.paint('broken', Tone.BAD)}",
        *columns(
            [
                ("distribution", f"{problem.distribution} {problem.version}"),
                ("entry point", problem.entry_point),
                ("stage", problem.stage),
                ("cause", problem.cause),
                ("fix", problem.fix),
            ],
            style,
            indent=2,
        ),
    ]


def _section(section: Section, style: Style) -> list[str]:
    one = section.candidate
    what = one.group.rpartition(".")[2].removesuffix("s")
    name = style.paint(f"{what} {one.name}", Tone.STRONG)
    lines = [f"{name} ({one.distribution} {one.version})"]
    for row in section.rows:
        state = f"  {row.state:<{_STATE}}  "
        first, *rest = paragraph(row.what, style, indent=len(state))
        lines.append(style.paint(state, tone_of(row.state)) + first[len(state) :])
        lines += rest
        if row.hint:
            lines += paragraph(row.hint, style, indent=len(state))
    return lines


def as_data(diagnosis: Diagnosis) -> dict[str, object]:
    """Describe the diagnosis as data."""
    return {
        "schema": SCHEMA,
        "ok": diagnosis.ok,
        "problems": plain(diagnosis.problems),
        "sections": [
            {
                "name": section.candidate.name,
                "group": section.candidate.group,
                "distribution": section.candidate.distribution,
                "version": section.candidate.version,
                "findings": plain(section.rows),
            }
            for section in diagnosis.sections
        ],
        "hidden": list(diagnosis.hidden),
    }
