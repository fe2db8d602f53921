"""The site, built once for all tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def planted() -> str:
    """A value of the builder's environment that no file of the site may hold."""
    return "planted-4c1b0c7e"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, planted: str) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = tmp_path_factory.mktemp("doctrees")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(built), str(ROOT / "docs"), str(folder)],
        capture_output=True,
        env={**os.environ, "BUILDER_TOKEN": planted},
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder
