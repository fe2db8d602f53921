"""The doctor's section, where SGLang need not be installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kvdock_sglang import doctor, engine_api
from kvdock_sglang.launch_flags import (
    EXTRA,
    LOADER_KEYS,
    Flags,
    command_line,
    configuration,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _tested_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    versions = {"sglang": engine_api.TESTED[0]}
    monkeypatch.setattr(
        metadata, "version", lambda name: versions.get(name) or real(name)
    )
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    # The disk that tests run on may have less than a store leaves free.
    monkeypatch.setenv("KVDOCK_BACKENDS__FILE__FREE_SPACE", "0")


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
    assert extra == {**LOADER_KEYS, **given}


def test_a_command_that_does_not_wait_for_pages_is_answered_with_what_that_costs(
    tmp_path: Path,
) -> None:
    found = doctor.examine({"plugin": "file", "root": str(tmp_path)})
    line = found[-1].what.partition("\n")[2]
    hasty = line.replace("wait_complete", "timeout")
    shown = [
        any("wait_complete" in one.hint for one in found if one.warning)
        for found in (
            doctor.examine({"command": line}),
            doctor.examine({"command": hasty}),
        )
    ]
    assert shown == [False, True]


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
        # What the chosen plugin finds, and those that pools are routed to.
        ({"plugin": "file", "root": "/proc/nope"}, "/proc/nope' cannot be opened", ""),
        ({"plugin": "mooncake"}, "mooncake: backend 'mooncake': no master", ""),
        ({"plugin": "mooncake", "master": "foo"}, "'foo' is not host:port", ""),
        ({"plugin": "mooncake", "master": "127.0.0.1:1"}, "127.0.0.1:1", ""),
        (
            {
                "plugin": "mooncake",
                "master": "127.0.0.1:1",
                "routes.mamba": "file",
                "backends.file.root": "/proc/nope",
            },
            "/proc/nope' cannot be opened",
            "",
        ),
        ({"command": "sglang serve 'x"}, "cannot be read: No closing", "quotes"),
        ({"command": "sglang serve > log &"}, "goes on after '&'", "Leave out"),
        ({"command": "sglang serve | tee log"}, "goes on after '|'", "Leave out"),
        ({"command": "sglang serve", "root": "/x"}, "--set root", "into command"),
        ({"config": "{}", "plugin": "file"}, "--set plugin", "into config"),
        ({"config": "@/c.ini"}, "/c.ini is not a kind", ".json, .toml, .yaml"),
        ({"core.deadlines.gte": "2s"}, "does not say which plugin", ""),
        (
            {"plugin": "file", "root": "/x", "core.deadlines.gte": "2s"},
            "core: unknown setting 'deadlines.gte'",
            "'get'",
        ),
        ({"plugin": "file", "core": "2", "root": "/x"}, "not a JSON object", ""),
        ({"plugin": "file", "root.a": "/x"}, "unknown setting 'root.a'", "'root'"),
        (
            {"plugin": "file", "root": "/x", "prefetch_threshold": "few"},
            "prefetch_threshold is 'few'",
            "as int, unquoted",
        ),
        (
            {"command": "sglang serve --hicache-mem-layout page_firts"},
            "page_firts is not known",
            "'page_first'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(
    settings: dict[str, object], what: str, hint: str
) -> None:
    found = wrong(settings)
    assert any(what in said and hint in fix for said, fix in found.items()), found


def test_a_healthy_plugin_is_probed_and_said_to_be(tmp_path: Path) -> None:
    found = doctor.examine({"plugin": "file", "root": str(tmp_path)})
    assert any(one.ok and f"file: root {tmp_path}" in one.what for one in found)


def test_a_command_that_cannot_be_read_leaves_the_versions_to_be_seen() -> None:
    found = doctor.examine({"command": "sglang serve 'x"})
    assert found[0].what == f"SGLang {engine_api.TESTED[0]}"


def test_groups_and_sglangs_own_settings_are_kept_with_their_types(
    tmp_path: Path,
) -> None:
    given: dict[str, object] = {
        "plugin": "file",
        "root": str(tmp_path),
        "prefetch_threshold": "16",
        "tp_lcm_size": "8",
        "core.deadlines.get": "2s",
        "core": '{"calls": {"max_concurrent_calls": 2}}',
        "routes": '{"kv": "file"}',
        "backends.file.threads": "3",
    }
    assert not wrong(given)
    line = doctor.examine(given)[-1].what.partition("\n")[2]
    assert json.loads(Flags.of(line).given[EXTRA]) == {
        **LOADER_KEYS,
        "plugin": "file",
        "root": str(tmp_path),
        "prefetch_threshold": 16,
        "tp_lcm_size": 8,
        "core": {"deadlines": {"get": "2s"}, "calls": {"max_concurrent_calls": 2}},
        "routes": {"kv": "file"},
        "backends": {"file": {"threads": "3"}},
    }


def test_an_examined_command_keeps_what_the_operator_has_and_gets_what_lacks(
    tmp_path: Path,
) -> None:
    extra = json.dumps({**LOADER_KEYS, "plugin": "file", "root": str(tmp_path)})
    mine = (
        'sglang serve --model-path "$MODEL" --tp-size 8 '
        f"--hicache-storage-backend file {EXTRA} '{extra}'"
    )
    shown = doctor.examine({"command": mine})[-1].what.partition("\n")[2]
    assert shown.startswith(mine)
    assert not wrong({"command": shown})
    words = shlex.split(shown.replace("\\\n", " "))
    assert words[-5:] == [
        "--enable-hierarchical-cache",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-prefetch-policy",
        "wait_complete",
    ]


@pytest.mark.parametrize("lacking", ["", "HybridCacheController.should_backup"])
def test_of_an_untested_sglang_the_doctor_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23.post1")

    def missing(used: engine_api.Used) -> tuple[str, ...]:
        return (used.path,) if lacking and used.path.endswith(lacking) else ()

    monkeypatch.setattr(engine_api.Used, "missing", missing)
    found = wrong({})
    if not lacking:
        assert not found
        return
    (what,) = found
    assert "draft models" in what
    assert lacking in found[what]


def test_an_untested_sglang_without_what_storage_uses_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.9")
    first = engine_api.STORAGE[0].path

    def missing(used: engine_api.Used) -> tuple[str, ...]:
        return (f"{first}.tp_rank",) if used.path == first else ()

    monkeypatch.setattr(engine_api.Used, "missing", missing)
    (what,) = wrong({})
    assert "not one of the tested versions (0.5.23)" in what
    assert "HiCacheStorageConfig.tp_rank" in what


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kv.json", '{"plugin": "file", "core": {"observers": []}}'),
        ("kv.toml", 'plugin = "file"\n[core]\nobservers = []'),
        ("kv.YAML", "plugin: file\ncore: {observers: []}"),
        ("kv.yml", "plugin: file\ncore: {observers: []}"),
    ],
)
def test_a_configuration_may_come_from_a_file_of_sglangs_kinds(
    tmp_path: Path, name: str, text: str
) -> None:
    if "y" in name.lower():
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(text)
    assert configuration(f"@{path}") == {"plugin": "file", "core": {"observers": []}}


@pytest.mark.parametrize("name", ["no.json", "no.toml"])
def test_a_file_that_is_not_there_or_says_something_else_is_named(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    asked: dict[str, object] = {"config": f"@{path}"}
    assert any("cannot be read" in what for what in wrong(asked))
    path.write_text("plugin")
    assert any(str(path) in hint for hint in wrong(asked).values())


def test_the_command_line_survives_a_shell() -> None:
    line = command_line({"root": "/a b/'c'"})
    words = shlex.split(line.replace("\\\n", " "))
    assert json.loads(words[words.index(EXTRA) + 1])["root"] == "/a b/'c'"
