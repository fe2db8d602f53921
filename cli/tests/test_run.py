"""`kvdock run` and `kvdock config ENGINE`, with stand-ins for adapter and engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvdock_cli.commands import run

if TYPE_CHECKING:
    from tiny import Shelf

ADAPTER = """
import json
from kvdock import Finding
from kvdock.launch import Launch

def launch(command, settings):
    full = settings.get("full") == "yes"
    hint = "Free some." if full else ""
    return Launch(
        flags=["--storage", json.dumps(dict(settings)), "--fast"],
        variables={"SEED": "0"},
        findings=[
            Finding(ok=True, what=f"engine {command[0]}"),
            Finding(ok=not full, what="the disk has room", hint=hint),
        ],
    )
"""
ENGINE = """#!{python}
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("SEED")]))
sys.exit(7)
"""


@pytest.fixture
def engine(shelf: Shelf) -> Path:
    """Put an adapter of an engine on the shelf, and its command beside it."""
    shelf.add(
        "run.motor", ADAPTER, group="kvdock.commands", attribute="launch",
        distribution="kvdock-motor",
    )  # fmt: skip
    program = shelf.root / "motor"
    program.write_text(ENGINE.format(python=sys.executable))
    program.chmod(0o755)
    return program


def test_the_engine_takes_the_place_of_the_command(engine: Path, shelf: Shelf) -> None:
    done = shelf.kvdock(
        "run", "--set", "plugin=file", "--", str(engine), "serve", "--model", "M"
    )
    assert done.returncode == 7
    _, words, seed = json.loads(done.stdout)
    assert words == [
        "serve", "--model", "M", "--storage", '{"plugin": "file"}', "--fast",
    ]  # fmt: skip
    assert seed == "0"
    lines = done.stderr.splitlines()
    assert lines[-4:] == [
        "kvdock adds to the command:",
        "SEED=0",
        '--storage \'{"plugin": "file"}\'',
        "--fast",
    ]
    assert f"  ok       engine {engine}" in lines


@pytest.mark.usefixtures("engine")
def test_an_engine_is_known_by_the_module_that_python_runs(shelf: Shelf) -> None:
    (shelf.root / "motor.py").write_text(ENGINE)
    command = (sys.executable, "-m", "motor", "--port", "1")
    done = shelf.kvdock("run", "--set", "plugin=file", "--", *command)
    assert done.returncode == 7
    assert json.loads(done.stdout)[1][:2] == ["--port", "1"]


def test_an_engine_whose_checks_find_a_problem_is_not_started(
    engine: Path, shelf: Shelf
) -> None:
    words = ("--set", "plugin=file", "--set", "full=yes")
    done = shelf.kvdock("run", *words, "--", str(engine))
    assert (done.stdout, done.returncode) == ("", 1)
    assert "  problem  the disk has room\n           Free some." in done.stderr
    shown = shelf.kvdock("config", "motor", *words)
    assert (shown.stdout, shown.returncode) == ("the disk has room Free some.\n", 1)


@pytest.mark.usefixtures("engine")
def test_the_flags_can_be_printed_instead(shelf: Shelf) -> None:
    shown = shelf.kvdock("config", "motor", "--set", "plugin=file")
    assert (shown.stderr, shown.returncode) == ("", 0)
    assert shown.stdout == 'SEED=0\n--storage \'{"plugin": "file"}\'\n--fast\n'
    data = json.loads(shelf.kvdock("config", "motor", "--json").stdout)
    assert (data["schema"], data["engine"]) == ("kvdock.config-engine/1", "motor")
    assert data["flags"][0] == "--storage"
    assert [one["ok"] for one in data["findings"]] == [True, True]


@pytest.mark.usefixtures("engine")
def test_without_settings_pages_go_to_the_users_cache(
    shelf: Shelf, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    shown = shelf.kvdock("config", "motor", "--json", XDG_CACHE_HOME=cache)
    settings = json.loads(json.loads(shown.stdout)["flags"][1])
    assert settings == {"plugin": "file", "root": f"{cache}/kvdock"}


def test_a_configured_backend_goes_before_a_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.s3]\nurl = "s3://bucket"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert run.storage_settings({}) == {"plugin": "s3"}
    file.write_text(file.read_text() + '[[tiers]]\nbackend = "s3"\n')
    tiers: Any = run.storage_settings({})["tiers"]
    assert [tier["backend"] for tier in tiers] == ["s3"]
    assert run.storage_settings({"plugin": "file"}) == {"plugin": "file"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "missing argument 'command'"),
        (("--", "nope", "serve"), "no installed adapter knows 'nope serve'"),
        (("--", "python", "-m"), "no installed adapter knows 'python -m'"),
        (
            ("--set", "plugin=file", "--", "/nowhere/motor"),
            "cannot be started: No such",
        ),
    ],
)
@pytest.mark.usefixtures("engine")
def test_a_command_that_starts_no_engine_is_wrong_use(
    shelf: Shelf, words: tuple[str, ...], said: str
) -> None:
    done = shelf.kvdock("run", *words)
    assert (done.stdout, done.returncode) == ("", 2)
    assert said in done.stderr


@pytest.mark.usefixtures("engine")
def test_an_adapter_is_no_command_of_its_own(shelf: Shelf) -> None:
    assert "run.motor" not in shelf.kvdock("--help").stdout
    assert shelf.kvdock("run.motor").returncode == 2
