"""The page that newcomers read first names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/architecture.md"
ROOTS = (
    ROOT,
    ROOT / "core/src/kvdock",
    ROOT / "core/src",
    ROOT / "segments/src",
    ROOT / "plugins/file/src",
)
MENTIONED = sorted(set(re.findall(r"`([\w/.-]+\.py)(?::([\w.]+))?`", PAGE.read_text())))


@pytest.mark.parametrize(("path", "name"), MENTIONED)
def test_what_the_page_names_exists(path: str, name: str) -> None:
    found = next((one / path for one in ROOTS if (one / path).is_file()), None)
    assert found is not None, f"{path} is gone: update {PAGE.relative_to(ROOT)}"
    scope: ast.AST = ast.parse(found.read_text())
    for word in filter(None, name.split(".")):
        inside = {
            node.name: node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert word in inside, f"{path} has no {name}"
        scope = inside[word]


def test_the_page_names_the_way_of_a_get() -> None:
    assert len([name for _, name in MENTIONED if name]) >= 10
