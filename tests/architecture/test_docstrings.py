"""Docstrings: arguments that they name exist, and their sentences are whole.

Usage: python tests/architecture/test_docstrings.py prints the sentences that begin as
a clause, and their share. The sample is the first line of every docstring of a module,
a class and a function in the sources of every distribution.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A first sentence that begins so is a clause: it has no subject or no verb of its own.
CLAUSE = re.compile(
    r"(What|Whether|How|Where|When|Which|Who|Whose|Why|That|As|Than|Like|So|If|Since|"
    r"Because|Otherwise|Until|Once|Before|After|Up|With|Without|Within|In|From|Of|On|By|"
    r"For|At|To|Through|Between|Under|Behind|Beside|Beyond|Per|Also|Only|Not|Never|"
    r"Almost|And|But|Or)\b"
)
MOST_CLAUSES = 0.03
SECTION = re.compile(r"^Args:\n((?:    .*\n?|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    \**(\w+)(?: \(.*?\))?:", re.MULTILINE)


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    rest = [one.arg for one in (given.vararg, given.kwarg) if one]
    named = [one.arg for one in given.posonlyargs + given.args + given.kwonlyargs]
    return {*named, *rest}


def _fields(group: ast.ClassDef) -> set[str]:
    """Return fields, as attrs names them as arguments, and arguments of __init__."""
    found: set[str] = set()
    for one in group.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found |= {one.target.id, one.target.id.lstrip("_")}
        if isinstance(one, ast.FunctionDef) and one.name in {"__init__", "__new__"}:
            found |= _arguments(one)
    return found


def unknown_arguments(source: str) -> Iterator[str]:
    """Yield "line name: argument" for arguments that a docstring alone has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            known = _fields(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = _arguments(node)
        else:
            continue
        section = SECTION.search(ast.get_docstring(node) or "")
        # A class without fields of its own describes those of its parent.
        if section and known:
            for name in ENTRY.findall(section[1]):
                if name not in known:
                    yield f"{node.lineno} {node.name}: {name}"


def _sources() -> list[Path]:
    return sorted(
        path
        for folder in ("core", "segments", "plugins", "cli", "engines")
        for path in (ROOT / folder).rglob("src/**/*.py")
    )


def test_a_docstring_names_arguments_that_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{one}"
        for path in _sources()
        for one in unknown_arguments(path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        'def f(a):\n    """Do.\n\n    Args:\n        b: What.\n    """\n',
        'class C:\n    """It.\n\n    Args:\n        b: What.\n    """\n\n    a: int\n',
    ],
)
def test_an_argument_that_was_renamed_is_found(source: str) -> None:
    assert [one.partition(": ")[2] for one in unknown_arguments(source)] == ["b"]


def first_words(source: str) -> Iterator[str]:
    """Yield the first line of every docstring of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text.partition("\n")[0]


def counted() -> tuple[list[str], int]:
    """Return the sentences that begin as a clause, and how many there are in all."""
    found = [line for path in _sources() for line in first_words(path.read_text())]
    return [line for line in found if CLAUSE.match(line)], len(found)


def test_docstrings_begin_with_a_verb_or_a_noun_phrase() -> None:
    clauses, count = counted()
    assert count > 1000
    assert len(clauses) <= MOST_CLAUSES * count, "\n".join(clauses)


if __name__ == "__main__":
    CLAUSES, COUNT = counted()
    print(*CLAUSES, sep="\n")  # noqa: T201 - it is a script then
    print(f"{len(CLAUSES)} of {COUNT}: {len(CLAUSES) / COUNT:.2%}")  # noqa: T201
