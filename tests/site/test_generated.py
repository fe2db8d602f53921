"""Pages that are generated are those that their scripts would write now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ["commands", "settings", "metrics", "manifests", "compatibility", "sizes"]
"""Those of hooks and of the README have tests of their own."""


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_generated_page_is_fresh(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"docs/fill_{script}.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_script_is_run_by_make_and_by_a_test() -> None:
    there = {path.stem.removeprefix("fill_") for path in ROOT.glob("docs/fill_*.py")}
    assert there == {*SCRIPTS, "hooks", "readme"}
    line = next(
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "docs/fill_$$script.py" in line
    )
    made = line.partition(" in ")[2].partition(";")[0].split()
    assert set(made) == there
