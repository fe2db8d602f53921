from __future__ import annotations

import ast
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdock import API_VERSION, Batch, Operation, Outcome
from kvdock.errors import KvdockError
from kvdock_cli.commands.new import new, project
from kvdock_cli.output import UsageProblem

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    "name", ["Big", "1st", "a-b", "", "a" * 33, "../up", "x_", "a_b_", "x\n"]
)
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(UsageProblem, match="valid backend name"):
        project(name)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UsageProblem, match="taken by kvdock-file"):
        project("file")


@pytest.mark.parametrize(
    "folder",
    [ROOT / "cli", *ROOT.glob("plugins/*"), *ROOT.glob("engines/*")],
    ids=lambda folder: folder.name,
)
def test_a_name_of_the_house_is_refused_installed_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdock_cli.commands.new.list_entry_points", list)
    with pytest.raises(UsageProblem, match=f"taken by kvdock-{folder.name}"):
        project(folder.name)


@pytest.mark.parametrize("name", ["my_store", "my__store"])
def test_a_name_whose_distribution_is_installed_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "kvdock_my_store-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvdock-my-store\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageProblem, match="taken by kvdock-my-store"):
        project(name)


@pytest.mark.parametrize("name", ["x", "a1", "a_b", "class", "a" * 32])
def test_a_projects_distribution_has_a_name_that_can_be_built(name: str) -> None:
    called = tomllib.loads(project(name)["pyproject.toml"])["project"]["name"]
    # As PEP 508 spells a name.
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", called)


def test_a_project_lies_in_a_folder_of_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new("x") == 0
    assert (tmp_path / "x" / "pyproject.toml").exists()
    assert "pip install -e 'x[test]'" in capsys.readouterr().out


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """The generated store, over a folder that is there."""
    source = tmp_path / "store.py"
    source.write_text(project("x")["src/kvdock_x/store.py"])
    return runpy.run_path(str(source))["Store"](tmp_path / "pages")


def moved(store: Any, operation: Operation, page: npt.NDArray[np.uint8]) -> Outcome:
    at, size = [[page.ctypes.data]], [[page.nbytes]]
    return Outcome(int(store.run(Batch(operation, ["key"], at, size)).outcomes[0]))


def test_the_generated_store_leaves_nothing_beside_a_page(store: Any) -> None:
    page = np.arange(64, dtype=np.uint8)
    assert moved(store, Operation.PUT, page) is Outcome.OK
    assert len([*store.folder.iterdir()]) == 1
    back = np.zeros_like(page)
    assert moved(store, Operation.GET, back) is Outcome.OK
    assert (back == page).all()


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_the_generated_store_refuses_what_it_cannot_write(
    store: Any, instead: str
) -> None:
    store.folder.rmdir()
    if instead == "a file":
        store.folder.write_text("in the way")
    page = np.zeros(64, np.uint8)
    assert moved(store, Operation.PUT, page) is Outcome.REFUSED


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


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvdockError, match="cannot be written: Not a directory"):
        new("my_store", into=str(tmp_path / "file" / "below"))
