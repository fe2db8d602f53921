from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvdock.contract import Stage
from kvdock.discovery import BrokenPlugin, Candidate
from kvdock.errors import KvdockError, NoRoute, PluginError, SettingsError
from kvdock_cli.output import UsageProblem, exit_code

if TYPE_CHECKING:
    from pathlib import Path

    from tiny import Shelf

BROKEN = Candidate(name="a", value="a", distribution="d", version="1").problem(
    Stage.IMPORT, "broken", "Mend it."
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageProblem("x"), 2),
        (SettingsError("x"), 2),
        (PluginError("x"), 2),
        (BrokenPlugin(BROKEN), 1),
        (NoRoute("x"), 1),
        (KvdockError("x"), 1),
    ],
)
def test_wrong_questions_and_bad_news_have_different_codes(
    error: KvdockError, code: int
) -> None:
    assert exit_code(error) == code


def test_no_command_at_all_shows_the_help(shelf: Shelf) -> None:
    done = shelf.kvdock()
    assert done.returncode == 2
    assert "Usage: kvdock" in done.stdout + done.stderr
    assert shelf.kvdock("--json").returncode == 2


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_names_every_command(shelf: Shelf, flag: str) -> None:
    done = shelf.kvdock(flag)
    assert (done.stderr, done.returncode) == ("", 0)
    for name in ("list", "show", "route", "doctor"):
        assert f"\n  {name}" in done.stdout


@pytest.mark.parametrize("arguments", [("list", "--nope"), ("show",), ("--nope",)])
def test_a_wrong_call_is_a_usage_error(shelf: Shelf, arguments: tuple[str]) -> None:
    done = shelf.kvdock(*arguments)
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr


def test_the_version_names_every_part_without_importing_it(shelf: Shelf) -> None:
    shelf.add_backend("good", ("from kvdock", "import nowhere\nfrom kvdock"))
    shelf.add("greet", "", group="kvdock.commands", attribute="greet")
    shelf.add("gone", "")
    (shelf.root / "kvdock_gone.py").unlink()
    done = shelf.kvdock("--version", "--json")
    assert (done.stderr, done.returncode) == ("", 0)
    parts = {one["name"]: one for one in json.loads(done.stdout)["parts"]}
    assert parts["backend good"] == {
        "name": "backend good",
        "version": "1.2.3",
        "distribution": "kvdock-good",
        "path": str(shelf.root / "kvdock_good.py"),
    }
    assert parts["command greet"]["path"] == str(shelf.root / "kvdock_greet.py")
    assert parts["backend gone"]["path"] == "?"
    assert {"python", "kvdock", "kvdock-cli"} <= set(parts)
    assert "kvdock_good.py" in shelf.kvdock("--version").stdout


def test_a_path_of_any_bytes_can_be_told(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    root = f"{tmp_path}/\udcff \u00e4"
    done = shelf.kvdock("doctor", "file", "--set", f"root={root}")
    assert (done.stderr, done.returncode) == ("", 0)
    assert r"\udcff \xe4" in done.stdout
