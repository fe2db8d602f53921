"""An instance's name stands wherever a command takes a backend's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvdock.errors import PluginError
from kvdock_cli.commands.doctor import doctor
from kvdock_cli.commands.list import list_backends
from kvdock_cli.commands.route import route

if TYPE_CHECKING:
    from pathlib import Path

KV = "family=mha,name=kv,heads=2,head_dim=8"


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances of one plugin, in the file that the environment names."""
    file = tmp_path / "kvdock.toml"
    file.write_text(
        f'[backends.near]\nplugin = "file"\nroot = "{tmp_path / "near"}"\n'
        f'[backends.far]\nplugin = "file"\nroot = "{tmp_path / "far"}"\n'
    )
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))


@pytest.mark.usefixtures("configured")
def test_an_instance_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_backends("far") == 0
    assert capsys.readouterr().out.startswith("far: pages in files")


@pytest.mark.usefixtures("configured")
def test_instances_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_backends(json=True) == 0
    found = {
        one["name"]: one for one in json.loads(capsys.readouterr().out)["backends"]
    }
    assert found["near"]["instance_of"] == found["far"]["instance_of"] == "file"
    assert not found["file"]["instance_of"]
    assert list_backends() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "far " in line]
    assert rows
    assert "file under another name" in rows[0]
    assert len(rows) == 1


@pytest.mark.usefixtures("configured")
def test_an_instance_is_examined_by_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert doctor("far") == 0
    said = capsys.readouterr().out
    assert said.startswith("backend far (kvdock-file")
    assert str(tmp_path / "far") in said
    assert str(tmp_path / "near") not in said


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize(
    ("backend", "to"), [(("far",), ()), (("near",), ("kv=far",)), ((), ("kv=far",))]
)
def test_a_pool_is_routed_to_an_instance(
    backend: tuple[str, ...], to: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert route(pool=(KV,), backend=backend, to=to, json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["routes"]
    assert found["backend"] == "far"


def test_an_instance_that_is_not_configured_is_no_backend() -> None:
    with pytest.raises(PluginError, match="'far'"):
        route(pool=(KV,), backend=("far",))
