"""Hold the figures of the source and of a page's way against one file of numbers.

Usage: python tests/harness/budgets.py [WHY]

Lowers the numbers of `tests/budgets/budgets.toml` to what is measured, and says what is
over. With a reason it raises what is over, and writes the reason beside each. A merge
keeps the lines of both sides: the larger number of two counts, then this lowers it.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
from source_sizes import KINDS, ROOT, sizes

from kvdock import native

FILE = ROOT / "tests" / "budgets" / "budgets.toml"
PYTHON = "3.11"
"""Other versions call other functions for the same source."""

HEAD = f"""\
# The most that each figure may be: `make test` says what is over and what could be
# lowered, `make budgets` lowers it. A number that has to rise says why in its line:
# `make budgets WHY="..."` writes it. After a merge, run `make budgets`.
# Calls are counted by benchmarks/page_path.py on Python {PYTHON}, the rest by
# tests/harness/source_sizes.py.
"""
SECTIONS = {
    "way": "Of a warm call on the file backend.",
    "varying": "Of calls that vary from run to run: with a fifth of room.",
    "statements": "Without imports and docstrings.",
    "functions": "",
    "classes": "",
    "vague_names": "Assignments to the nouns `VAGUE` of source_sizes.py.",
    "packed_calls": "Calls that unpack a tuple which their own function has made.",
}
ROOM = 1.2
_LINE = re.compile(r'"?(?P<name>[\w/]+)"? = (?P<most>\d+)(?: # from (?P<why>\d+: .+))?')


@attrs.frozen
class Budget:
    """The most that a figure may be."""

    most: int
    why: str = ""
    """Where it rose: from which number, and the reason."""

    def lowered(self, most: int) -> Budget:
        """Return it with a smaller number; a rise that was undone needs no reason."""
        risen = self.why and most > int(self.why.partition(":")[0])
        return Budget(most, self.why if risen else "")


Budgets = dict[str, Budget]
Figures = Mapping[str, int]


def read(text: str) -> Budgets:
    """Return the budgets of a file by section and name; of two, the larger one."""
    budgets: Budgets = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := _LINE.fullmatch(line):
            name, budget = (
                f"{section}.{match['name']}",
                Budget(int(match["most"]), match["why"] or ""),
            )
            budgets[name] = max(budget, budgets.get(name, budget), key=_most)
        elif line and not line.startswith("#"):
            raise ValueError(f"{FILE.name}: no budget: {line!r}")
    return budgets


def _most(budget: Budget) -> int:
    return budget.most


def written(budgets: Budgets) -> str:
    lines = [HEAD]
    for section, about in SECTIONS.items():
        lines += [f"[{section}]", *([f"# {about}"] if about else ())]
        for key, budget in sorted(budgets.items()):
            kind, _, name = key.partition(".")
            if kind == section:
                quoted = name if re.fullmatch(r"\w+", name) else f'"{name}"'
                why = f" # from {budget.why}" if budget.why else ""
                lines.append(f"{quoted} = {budget.most}{why}")
        lines.append("")
    return "\n".join(lines)


def source_figures(root: Path = ROOT) -> Figures:
    return {
        f"{kind}.{package}": counts[kind]
        for package, counts in sizes(root).items()
        for kind in KINDS
    }


def not_comparable() -> str:
    """Return why this process counts other calls than the file's; "" if it does not."""
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        return f"the calls are those of Python {PYTHON}"
    return "" if native.library() else "the calls are those with compiled code"


def way_figures() -> Figures:
    """Return the figures of a page's way."""
    script = ROOT / "benchmarks" / "page_path.py"
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(ran.stdout + ran.stderr)
    return by_section(json.loads(ran.stdout.splitlines()[-1]))


def by_section(figures: Mapping[str, float]) -> Figures:
    """Name the figures as the file does, those that vary rounded up."""
    return {
        f"{'varying' if _varies(name) else 'way'}.{name}": math.ceil(figure)
        for name, figure in figures.items()
    }


def _varies(name: str) -> bool:
    return "_large_" in name or "_full_" in name


def over(figures: Figures, budgets: Budgets) -> list[str]:
    """Return a line for each figure above its budget, or without one."""
    return [
        f"{name} is {figure}, at most {budgets[name].most}"
        if name in budgets
        else f"{name} is {figure} and has no budget"
        for name, figure in sorted(figures.items())
        if name not in budgets or figure > budgets[name].most
    ]


def _target(name: str, figure: int) -> int:
    return math.ceil(figure * ROOM) if name.startswith("varying.") else figure


def _lower(name: str, figure: int, most: int) -> int:
    target = _target(name, figure)
    # Figures that vary follow no chance: a tenth is more than they vary.
    near = name.startswith("varying.") and target > 0.9 * most
    return most if near else min(most, target)


def lowered(figures: Figures, budgets: Budgets) -> Budgets:
    """Return the budgets of these figures, none higher than before."""
    return {
        name: budget.lowered(_lower(name, figures[name], budget.most))
        for name, budget in budgets.items()
        if name in figures
    }


def raised(figures: Figures, budgets: Budgets, why: str) -> Budgets:
    """Return the budgets with each figure that is over allowed, for that reason."""
    result = dict(budgets)
    for name, figure in figures.items():
        budget = budgets.get(name)
        if budget is None:
            result[name] = Budget(_target(name, figure))
        elif figure > budget.most:
            result[name] = Budget(_target(name, figure), f"{budget.most}: {why}")
    return result


def to_lower(figures: Figures, budgets: Budgets) -> list[str]:
    """Return a line for each budget that `lowered` changes."""
    lower = lowered(figures, budgets)
    return [
        f"{name} could be {lower[name].most} instead of {budget.most}"
        if name in lower
        else f"{name} has a budget and no figure"
        for name, budget in sorted(budgets.items())
        if lower.get(name) != budget
    ]


def unexplained(before: Budgets, after: Budgets) -> list[str]:
    """Return a line for each budget that rose without a reason of its own."""
    return [
        f"{name} rose from {before[name].most} to {budget.most} and does not say why"
        for name, budget in sorted(after.items())
        if name in before
        and budget.most > before[name].most
        and budget.why in {"", before[name].why}
    ]


def main(arguments: list[str]) -> int:
    """Rewrite the file; return 1 if something is over and no reason was given."""
    if reason := not_comparable():
        sys.stderr.write(f"{reason}\n")
        return 2
    budgets = read(FILE.read_text())
    figures = {**source_figures(), **way_figures()}
    above = over(figures, budgets)
    why = " ".join(arguments).strip()
    if why:
        budgets = raised(figures, budgets, why)
    FILE.write_text(written(lowered(figures, budgets)))
    for line in above:
        sys.stdout.write(f"{line}{': raised' if why else ''}\n")
    return int(bool(above) and not why)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
