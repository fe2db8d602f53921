"""What `kvdock doctor` says: what is broken, and what probing found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._tables import columns, plain

if TYPE_CHECKING:
    from kvdock import Finding, PluginProblem
    from kvdock.plugin import Candidate

SCHEMA = "kvdock.doctor/1"


class State(StrEnum):
    """What became of one thing that was looked at."""

    OK = "ok"
    """As it should be."""
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
    """What one backend, or one doctor of another distribution, found."""

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
        """Whether nothing is wrong."""
        rows = [row for section in self.sections for row in section.rows]
        return not self.problems and all(row.state is not State.PROBLEM for row in rows)


def rows_of(findings: Iterable[Finding]) -> tuple[Row, ...]:
    """Turn findings into rows; an examination without any says so."""
    found = tuple(
        Row(State.OK if one.ok else State.PROBLEM, one.what, "" if one.ok else one.hint)
        for one in findings
    )
    return found or (Row(State.OK, "nothing to complain of"),)


def as_text(diagnosis: Diagnosis) -> str:
    """Render the diagnosis, what is broken first."""
    blocks = [_problem(problem) for problem in diagnosis.problems]
    blocks += [_section(section) for section in diagnosis.sections]
    if diagnosis.hidden:
        blocks.append([f"Not in KVDOCK_PLUGINS: {', '.join(diagnosis.hidden)}"])
    count = len(diagnosis.problems) + sum(
        row.state is State.PROBLEM
        for section in diagnosis.sections
        for row in section.rows
    )
    found = "no problem" if not count else f"{count} problem{'s' * (count > 1)}"
    blocks.append([f"{found} found"])
    return "\n\n".join("\n".join(block) for block in blocks)


def _problem(problem: PluginProblem) -> list[str]:
    what = problem.group.rpartition(".")[2].removesuffix("s")
    return [
        f"{what} {problem.name}: broken",
        *columns(
            [
                ("distribution", f"{problem.distribution} {problem.version}"),
                ("entry point", problem.entry_point),
                ("stage", problem.stage),
                ("cause", problem.cause),
                ("fix", problem.fix),
            ],
            indent=2,
        ),
    ]


def _section(section: Section) -> list[str]:
    one = section.candidate
    what = one.group.rpartition(".")[2].removesuffix("s")
    lines = [f"{what} {one.name} ({one.distribution} {one.version})"]
    for row in section.rows:
        lines.append(f"  {row.state:<7}  {row.what}")
        if row.hint:
            lines.append(f"{'':11}{row.hint}")
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
