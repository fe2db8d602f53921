"""A test that failed once is listed or fails the run, and never passes unseen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import second_try

ROOT = Path(__file__).parents[1]
CONFTEST = """
import second_try


def pytest_configure(config):
    second_try.configure(config, config.rootpath)
"""
FLAKY = """
from pathlib import Path


def test_{name}():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first output")
"""
FAILING = """
def test_{name}():
    raise AssertionError("each time")
"""
MAKE = """#!/bin/sh
case "$1" in
  venv) mkdir -p .venv/bin; cp programs/python .venv/bin ;;
  test-slow) [ "${{2#ARGS=core}}" = "$2" ] || exec {python} -m pytest -n 2 slow ;;
  test) exec {python} -m pytest quick ;;
esac
"""


def planted(folder: Path, **tests: str) -> None:
    for name, text in tests.items():
        folder.mkdir(exist_ok=True)
        (folder / f"test_{name}.py").write_text(text.format(name=name))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What .ci/run needs of a checkout, with suites of planted tests."""
    for file in (".ci/run", "tests/harness/second_try.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "make").write_text(MAKE.format(python=sys.executable))
    (programs / "python").write_text(
        f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n'
    )
    (programs / "apt-get").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    site = tmp_path / "tests" / "site"
    site.mkdir()
    (site / "requirements.txt").touch()
    planted(tmp_path / "quick", passing="def test_{name}():\n    pass\n")
    return tmp_path


def run(checkout: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{checkout / 'programs'}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout / "tests" / "harness"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        ["bash", str(checkout / ".ci" / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_planted_flake_is_listed_with_its_first_output_and_passes(
    checkout: Path,
) -> None:
    planted(checkout / "quick", first=FLAKY)
    planted(checkout / "slow", second=FLAKY)
    ran = run(checkout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    listed = ran.stdout.partition(" flaky =")[2]
    closing = ran.stdout.splitlines()[-1]
    assert "1 passed, 2 flaky in" in closing
    for text in (listed, (checkout / "build" / "flaky.txt").read_text()):
        assert "quick/test_first.py::test_first" in text
        assert "slow/test_second.py::test_second" in text
        assert text.count("AssertionError: the first output") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "name", "text"),
    [
        ("slow", "fails", FAILING),
        ("quick", "fails", FAILING),
        ("slow", "wrong_bytes", FLAKY),
        ("quick", "killed", FLAKY),
    ],
)
def test_what_fails_twice_or_may_not_fail_once_fails_the_run(
    checkout: Path, suite: str, name: str, text: str
) -> None:
    planted(checkout / "quick", flaky=FLAKY)
    planted(checkout / suite, **{name: text})
    ran = run(checkout)
    assert ran.returncode == 1
    assert f"test_{name}" in ran.stdout
    assert f"test_{name}" not in (checkout / "build" / "flaky.txt").read_text()
    assert "quick/test_flaky.py" in (checkout / "build" / "flaky.txt").read_text()


@pytest.mark.slow
def test_a_suite_that_does_not_come_to_its_end_fails_the_run(checkout: Path) -> None:
    planted(checkout / "slow", ends="import os\nos._exit(1)\n")
    assert run(checkout).returncode == 1


@pytest.mark.parametrize(
    ("nodeid", "defined_in"),
    [
        ("plugins/s3/tests/test_contract.py::TestS3::test_a_page", "damage.py"),
        ("segments/tests/test_damage.py::test_a_page", "segments/tests/test_damage.py"),
        ("tests/test_tiers_killed.py::test_it", "tests/test_tiers_killed.py"),
        ("core/tests/test_identity.py::test_it", "core/tests/test_identity.py"),
        ("core/tests/test_a.py::test_a_tenant_waits", "core/tests/test_a.py"),
    ],
)
def test_wrong_bytes_kills_tenants_and_identity_are_never_tried_again(
    nodeid: str, defined_in: str
) -> None:
    assert not second_try.may_repeat(nodeid, defined_in)
    assert second_try.may_repeat("tests/test_a.py::test_a_deadline", "tests/test_a.py")


@pytest.mark.slow
@pytest.mark.parametrize(("text", "status"), [(FLAKY, 1), ("def test_{name}(): 0", 0)])
def test_a_repeated_test_shows_its_first_failure(
    tmp_path: Path, text: str, status: int
) -> None:
    planted(tmp_path, repeated=text)
    script = ROOT / "tests" / "harness" / "repeat_test.py"
    ran = subprocess.run(
        [sys.executable, script, "2", tmp_path / "test_repeated.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert f"{status} of 2 failed" in ran.stdout
    assert ("the first output" in ran.stdout) == bool(status)
