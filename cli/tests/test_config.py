from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdock.config import Setting
from kvdock_cli.reports import config as report

if TYPE_CHECKING:
    from tiny import Shelf

SETTINGS = (
    Setting("core.deadlines.get", "2 s", "environment KVDOCK_X", "Loading."),
    Setting("backends.good.root", "", "MISSING", "Where."),
)


def test_a_table_names_every_setting_its_value_and_its_origin() -> None:
    assert report.report(SETTINGS, (), origin=True).text() == (
        "SETTING             VALUE  ORIGIN                WHAT\n"
        "core.deadlines.get    2 s  environment KVDOCK_X  Loading.\n"
        "backends.good.root      -  MISSING               Where."
    )
    assert report.report(SETTINGS, (), origin=False).text() == (
        "SETTING             VALUE  WHAT\n"
        "core.deadlines.get    2 s  Loading.\n"
        "backends.good.root      -  Where."
    )


def test_the_command_says_where_a_value_comes_from(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[core.deadlines]\nget = "3 s"\nput = "4 s"\n')
    monkeypatch.setenv("KVDOCK_CORE__DEADLINES__PUT", "50 ms")
    done = shelf.kvdock("config", "show", "--config", str(file), "--origin", "--json")
    assert done.stderr == ""
    found = {one["path"]: one for one in json.loads(done.stdout)["settings"]}
    assert found["core.deadlines.get"]["value"] == 3.0
    assert found["core.deadlines.get"]["unit"] == "seconds"
    assert found["core.deadlines.get"]["origin"] == f"file {file}"
    assert found["core.deadlines.put"]["origin"] == (
        "environment KVDOCK_CORE__DEADLINES__PUT"
    )
    assert found["core.integrity"]["origin"] == "default"


def test_changed_settings_are_those_that_something_sets(
    shelf: Shelf, tmp_path: Path
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[core.deadlines]\nget = "3 s"\n')
    arguments = ("config", "show", "--changed", "--config", str(file), "--json")
    settings = json.loads(shelf.kvdock(*arguments).stdout)["settings"]
    assert "core.deadlines.get" in [one["path"] for one in settings]
    assert not {one["origin"] for one in settings} & {"default", "MISSING"}


def test_a_misspelled_variable_is_a_usage_error(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDOCK_CORE__INTEGRTY", "off")
    done = shelf.kvdock("config", "show")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'integrity'?" in done.stderr


@pytest.mark.slow
def test_a_broken_observer_is_named_beside_the_settings_of_all_others(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("mine", "import nowhere", group="kvdock.observers", attribute="observer")
    monkeypatch.setenv("KVDOCK_OBSERVERS__MINE__RATE", "1")
    done = shelf.kvdock("config", "show", "--json")
    assert (done.stderr, done.returncode) == ("", 1)
    data = json.loads(done.stdout)
    assert [problem["name"] for problem in data["problems"]] == ["mine"]
    paths = {one["path"] for one in data["settings"]}
    assert {"core.integrity", "backends.file.root"} <= paths
    text = shelf.kvdock("config", "show").stdout
    assert "core.integrity" in text
    assert "Not usable, see `kvdock doctor`:\n  BROKEN" in text
