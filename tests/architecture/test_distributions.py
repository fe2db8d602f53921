"""What each distribution says of itself where it is published."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    path.parent
    for pattern in ("core", "cli", "plugins/*", "engines/*")
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
