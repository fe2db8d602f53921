"""The doctor's section, where SGLang need not be installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kvdock_sglang import doctor, hooks
from kvdock_sglang.launch import DOOR, EXTRA, Flags, command_line, configuration

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _tested_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    versions = {"sglang": hooks.TESTED[0]}
    monkeypatch.setattr(
        metadata, "version", lambda name: versions.get(name) or real(name)
    )
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def wrong(settings: dict[str, object]) -> dict[str, str]:
    return {one.what: one.hint for one in doctor.examine(settings) if not one.ok}


def test_a_plugin_and_its_settings_end_in_a_command_that_passes_the_examination(
    tmp_path: Path,
) -> None:
    given: dict[str, object] = {"plugin": "file", "root": str(tmp_path)}
    assert not wrong(given)
    line = doctor.examine(given)[-1].what.partition("\n")[2]
    assert "--hicache-storage-backend dynamic" in line
    assert not wrong({"command": line})
    extra = json.loads(Flags.of(line).given[EXTRA])
    assert extra == {**DOOR, **given}


def test_a_command_that_does_not_wait_for_pages_is_told_what_that_costs(
    tmp_path: Path,
) -> None:
    found = doctor.examine({"plugin": "file", "root": str(tmp_path)})
    line = found[-1].what.partition("\n")[2]
    hasty = line.replace("wait_complete", "timeout")
    told = [
        any("wait_complete mends that" in one.what for one in found)
        for found in (
            doctor.examine({"command": line}),
            doctor.examine({"command": hasty}),
        )
    ]
    assert told == [False, True]


def test_settings_of_the_adapter_are_kept_in_the_command(tmp_path: Path) -> None:
    given: dict[str, object] = {
        "plugin": "file",
        "root": str(tmp_path),
        "revision": "r1",
        "drafts": "lenient",
    }
    line = doctor.examine(given)[-1].what.partition("\n")[2]
    extra = json.loads(Flags.of(line).given[EXTRA])
    assert extra["revision"] == "r1"
    assert extra["drafts"] == "lenient"


@pytest.mark.parametrize(
    ("settings", "what", "hint"),
    [
        ({"plugin": "fil"}, "no backend 'fil' is installed", "Did you mean 'file'?"),
        ({"plugin": "file"}, "setting 'root' is missing", ""),
        ({"plugin": "file", "rot": "/x"}, "unknown setting 'rot'", "'root'"),
        ({"root": "/x"}, "does not say which plugin", "kvdock list"),
        ({"config": "{plugin"}, "is not JSON", "single quotes"),
        (
            {"config": '{"plugin": "file", "root": "/x"}'},
            "module_path",
            "kvdock_sglang",
        ),
        ({"command": "sglang serve"}, "the hierarchical cache is off", "Add --enable"),
        ({"plugin": "file", "root": "/x", "drafts": "maybe"}, "drafts", ""),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(
    settings: dict[str, object], what: str, hint: str
) -> None:
    found = wrong(settings)
    assert any(what in said and hint in fix for said, fix in found.items()), found


def test_an_untested_sglang_is_told_what_it_loses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.9")
    found = wrong({})
    assert list(found) == ["SGLang 0.9; the hooks are written for 0.5.23"]
    assert "draft models" in found["SGLang 0.9; the hooks are written for 0.5.23"]


def test_without_sglang_the_doctor_says_where_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    assert "SGLang is not installed in this environment" in wrong({})


def test_a_filter_that_leaves_kvdock_out_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "Add kvdock to SGLANG_PLUGINS." in wrong({}).values()
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvdock")
    assert not wrong({})


def test_a_configuration_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kv.json"
    path.write_text('{"plugin": "file"}')
    assert configuration(f"@{path}") == {"plugin": "file"}
    assert any("cannot be read" in what for what in wrong({"config": "@/no.json"}))


def test_the_command_line_survives_a_shell() -> None:
    line = command_line("file", {"root": "/a b/'c'"})
    words = shlex.split(line.replace("\\\n", " "))
    assert json.loads(words[words.index(EXTRA) + 1])["root"] == "/a b/'c'"
