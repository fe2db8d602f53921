from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest

from kvdock.manifest import API_VERSION
from kvdock_cli.creating import new, project
from kvdock_cli.output import UsageProblem


def test_a_project_has_one_word_everywhere() -> None:
    files = project("my_store")
    about = tomllib.loads(files["pyproject.toml"])["project"]
    assert about["name"] == "kvdock-my_store"
    assert about["entry-points"]["kvdock.backends"] == {
        "my_store": "kvdock_my_store.plugin"
    }
    assert 'name="my_store"' in files["src/kvdock_my_store/plugin.py"]
    assert "class TestMyStore(" in files["tests/test_contract.py"]


def test_a_project_says_the_number_and_not_the_constant() -> None:
    """A plugin was written for one contract, not for whichever is installed."""
    plugin = project("x")["src/kvdock_x/plugin.py"]
    assert f"api={API_VERSION}," in plugin
    assert "API_VERSION" not in plugin


@pytest.mark.parametrize("path", sorted(p for p in project("x") if p.endswith(".py")))
def test_every_file_is_python_with_no_placeholder_left(path: str) -> None:
    text = project("x")[path]
    ast.parse(text)
    assert "$" not in text


@pytest.mark.parametrize("name", ["Big", "1st", "a-b", "", "a" * 33, "../up"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem, match="valid backend name"):
        project(name)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UsageProblem, match="taken by kvdock-file"):
        project("file")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    with pytest.raises(UsageProblem, match="not empty"):
        new("x", into=str(folder))
    assert [path.name for path in folder.iterdir()] == ["precious"]


def test_json_says_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plugin"
    assert new("x", into=str(folder), json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "kvdock.new/1"
    assert said["ok"]
    assert all((folder / path).exists() for path in said["files"])
    assert said["next"][1] == "kvdock check x"
