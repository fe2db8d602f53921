"""What each distribution says of itself where it is published."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path.parent
    for pattern in ("core", "segments", "cli", "plugins/*", "engines/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())
    return dict(found["project"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_page_says_what_it_is_for_whom_and_under_which_license(folder: Path) -> None:
    about = project(folder)
    assert len(about["description"]) > 40
    assert "kv cache" in about["keywords"]
    assert "Intended Audience :: System Administrators" in about["classifiers"]
    assert any("Python :: 3.11" in one for one in about["classifiers"])
    for name in about["license-files"]:
        assert (folder / name).read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_page_shows_how_to_install_it_and_links_only_to_the_web(folder: Path) -> None:
    """A relative link leads nowhere on the page of an index."""
    text = (folder / "README.md").read_text()
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)
    assert re.search(rf"pip install .*{project(folder)['name']}", text), "how?"


def test_version_addresses_and_pythons_come_from_one_place() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "metadata.py", "--check"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_addresses_that_are_filled_in_are_in_every_package(tmp_path: Path) -> None:
    for path in (*FOLDERS, ROOT):
        there = tmp_path / path.relative_to(ROOT)
        there.mkdir(parents=True, exist_ok=True)
        text = (path / "pyproject.toml").read_text()
        text = text.replace('repository = ""', 'repository = "https://host/kvdock"')
        (there / "pyproject.toml").write_text(text)
    script = tmp_path / ".ci" / "metadata.py"
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "metadata.py").read_text())
    for _ in range(2):
        subprocess.run(
            [sys.executable, script, "--set-version", "0.3.0rc1"], check=True
        )
    for path in FOLDERS:
        about = project(tmp_path / path.relative_to(ROOT))
        assert about["version"] == "0.3.0rc1"
        assert about["urls"]["Issues"] == "https://host/kvdock/issues"
        asked = [one for one in about["dependencies"] if one.startswith("kvdock")]
        assert all(one.endswith(">=0.3.0rc1,<0.4") for one in asked)
        assert about.get("entry-points") == project(path).get("entry-points")


def test_each_folder_of_tests_is_in_one_of_the_slow_suites() -> None:
    script = (ROOT / ".ci/run").read_text()
    suites = re.findall(r"^test-slow (.+)$", script, re.MULTILINE)
    named = [word for suite in suites for word in suite.split() if word[:2] != "--"]
    for folder in re.findall(r"--ignore=(\S+)", script):
        assert f"suite test-slow {folder} " in script
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    assert sorted(named) == sorted(options["ini_options"]["testpaths"])


@pytest.mark.parametrize("name", ["test", "release"])
def test_workflows_try_every_python_that_is_supported(name: str) -> None:
    workflow = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvdock"]
    quoted = ", ".join(f'"{version}"' for version in versions["python"])
    assert f"python: [{quoted}]" in workflow


@pytest.mark.parametrize("name", ["test", "release"])
def test_actions_of_workflows_are_pinned_by_digest(name: str) -> None:
    """A tag can be moved to other code; a release runs with the right to publish."""
    workflow = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    used = re.findall(r"uses: (\S+)(.*)", workflow)
    assert used
    for action, rest in used:
        assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v[\d.]+", rest), f"{action} does not say its version"
