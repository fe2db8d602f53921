"""Pages that are generated are those that their scripts would write now."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    "benchmarks",
    "commands",
    "settings",
    "metrics",
    "packages",
    "hints",
    "manifests",
    "compatibility",
    "identity",
    "sizes",
    "rules",
]
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


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    path = ROOT / "docs" / "record_compatibility.py"
    spec = importlib.util.spec_from_file_location("record_compatibility", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "record_compatibility", module)
    spec.loader.exec_module(module)
    return module


def test_every_result_that_is_recorded_comes_from_a_test_that_is_there(
    recorder: Any,
) -> None:
    """A test that was renamed would be left out, and its states with it."""
    for engine, suites in recorder.SUITES.items():
        tests = {
            name
            for path in (ROOT / "engines" / engine / "tests").rglob("test_*.py")
            for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
        }
        assert tests.issuperset(name for suite in suites for name in suite.tests)


def test_results_are_recorded_by_backend_and_state(
    recorder: Any, tmp_path: Path
) -> None:
    every = (
        "test_pages_are_restored_from_every_backend_and_change_the_answer_if_altered"
    )
    path = tmp_path / "results.xml"
    path.write_text(
        "<testsuite>"
        f'<testcase name="{every}[mooncake-llama-mamba2]"/>'
        f'<testcase name="{every}[s3-llama]"><failure/></testcase>'
        f'<testcase name="{every}[nixl-llama]"><skipped/></testcase>'
        '<testcase name="test_pages_are_restored_in_a_new_process[draft]"/>'
        '<testcase name="test_something_else[mooncake-swa]"/>'
        "</testsuite>"
    )
    found: dict[str, dict[str, str]] = {}
    recorder.merged(found, list(recorder.from_tests("vllm", path)))
    assert found == {
        "mooncake": {"mha": "engine", "mamba": "engine"},
        "s3": {"mha": "failed"},
        "file": {"mha": "engine", "draft": "engine"},
    }


def test_the_picture_of_throughput_is_that_of_the_record() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/plot_file.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_index_of_decisions_has_each_record_once() -> None:
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    named = sorted(re.findall(r"\]\((0\d+[^)]*\.md)\)", index))
    assert named == sorted(p.name for p in (ROOT / "docs" / "decisions").glob("0*.md"))


def test_a_decision_that_another_one_replaced_says_so_in_its_second_line() -> None:
    records = {
        int(path.name[:4]): path for path in (ROOT / "docs" / "decisions").glob("0*.md")
    }
    said = {
        (int(old), new)
        for new, path in records.items()
        for old in re.findall(
            r"(?i)\breplaces?\b[^.]*?\bdecision (\d+)",
            " ".join(path.read_text().split()),
        )
    }
    named = {
        (old, int(new))
        for old, path in records.items()
        for new, name in re.findall(
            r"replaced by \[decision (\d+)\]\((\S+)\)\.\*$",
            path.read_text().split("\n")[2],
        )
        if records[int(new)].name == name
    }
    assert said == named
    assert len(named) >= 7
