"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_engine_code_runs_and_restores_every_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert '"root": "kv"' in code
    # The disk that tests run on may have less than a store leaves free.
    code = code.replace('"root": "kv"', '"root": "kv", "free_space": 0')
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.split()[-1] == "4"
    assert "one object a page" in printed


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_what_a_checkout_can_do_stands_before_what_a_release_brings() -> None:
    first, _, released = README.partition("## Once released")
    assert re.search(r"make demo .*\nmake test ", first)
    assert "pip install" not in first
    assert "pip install" in released
