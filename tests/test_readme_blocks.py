"""What the README shows of the command line is what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvdock.plugin import list_entry_points

ROOT = Path(__file__).parents[1]


def test_the_listing_and_the_table_of_the_readme_come_from_the_manifests() -> None:
    ours = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    missing = ours - {candidate.name for candidate in list_entry_points()}
    if missing:
        pytest.skip(f"not installed here: {', '.join(sorted(missing))}")
    done = subprocess.run(
        [sys.executable, "docs/fill_readme.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
