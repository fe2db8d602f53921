"""`pytest --kvdock-backend`: the contract in an author's own run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "harness"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            # This checkout has a conftest of its own above the kit.
            *("--noconftest", "-p", "kvdock.testing.pytest_plugin", *words),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HARNESS)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_named_backend_is_held_against_the_contract(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("--kvdock-backend", "reference:folder", "--kvdock-set", "root={tmp}"),
        *("-k", "test_a_deleted_page", "-vv"),
    )
    assert not done.returncode, done.stdout + done.stderr
    assert "test_a_deleted_page_is_gone_and_can_be_stored_again" in done.stdout
    assert " 1 passed" in f" {done.stdout.splitlines()[-1]}"


@pytest.mark.slow
def test_a_wrong_backend_fails(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("--kvdock-backend", "mutants:clears_the_first_thousand"),
        *("-k", "test_a_clear_forgets"),
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"\d+ of \d+ pages are left after a clear", done.stdout)


@pytest.mark.slow
def test_without_a_backend_an_authors_tests_run_as_ever(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    assert "1 passed" in run(tmp_path).stdout


def test_a_setting_that_is_none_is_a_wrong_question(tmp_path: Path) -> None:
    done = run(tmp_path, "--kvdock-backend", "x", "--kvdock-set", "root")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'root' is not KEY=VALUE" in done.stderr
