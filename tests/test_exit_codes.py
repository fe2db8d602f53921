"""The table of exit codes against the commands."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from kvdock_cli.main import _run

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "reference/commands.md").read_text()
ROWS = dict(
    re.findall(r"^\| `([a-z ]+)` \| .* \| `kvdock (.+)` \|$", PAGE, re.MULTILINE)
)


def test_every_command_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    commands = importlib.import_module("fill_commands").commands
    assert list(ROWS) == [name for name, _ in commands()]
    del sys.modules["fill_commands"], sys.modules["generated"]


@pytest.mark.parametrize("command", ROWS)
def test_its_example_of_wrong_use_is_one(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(ROWS[command])
    assert " ".join(words).startswith(command)
    monkeypatch.setattr("sys.argv", ["kvdock", *words])
    assert _run(as_json=False) == 2
    assert capsys.readouterr().err.startswith("kvdock: ")
