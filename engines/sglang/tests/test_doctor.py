"""The doctor's section, where SGLang need not be installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from kvdock import Dock, self_test
from kvdock.errors import KvdockError
from kvdock_sglang import doctor, engine_api
from kvdock_sglang.launch_flags import (
    EXTRA,
    LOADER_KEYS,
    Flags,
    command_line,
    configuration,
)
from kvdock_sglang.settings import collect

if TYPE_CHECKING:
    from pathlib import Path

    from tiny import Shelf


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
        ({"core.deadlines.get": "2s"}, "does not say which plugin", ""),
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


def test_of_an_untested_sglang_the_doctor_warns_and_imports_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(_: engine_api.Used) -> tuple[str, ...]:
        raise AssertionError("SGLang is imported")

    monkeypatch.setattr(engine_api.Used, "missing", look)
    monkeypatch.setattr(metadata, "version", lambda _: "0.9")
    assert not wrong({})
    warned = {one.what for one in doctor.examine({}) if one.warning}
    assert "SGLang 0.9 is not one of the tested versions (0.5.23)" in warned


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu128"])
def test_a_build_of_a_tested_release_is_tested(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert not any("tested versions" in one.what for one in doctor.examine({}))


@pytest.mark.parametrize(
    ("flag", "warned"),
    [("", True), (" --page-size 1", True), (" --page-size 64", False)],
)
def test_pages_of_one_token_are_warned_of(flag: str, *, warned: bool) -> None:
    command = f"sglang serve --model-path m --enable-hierarchical-cache{flag}"
    found = [one.what for one in doctor.examine({"command": command}) if one.warning]
    assert any("one token" in what for what in found) is warned


def test_without_sglang_the_doctor_says_where_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    missing = "SGLang is not installed in this environment"
    assert missing in wrong({"plugin": "file"})
    (skipped,) = doctor.examine({})
    assert (skipped.ok, skipped.skipped, skipped.what) == (True, True, missing)


def test_the_file_that_is_named_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text('[[tiers]]\nbackend = "fil"\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert any("'fil'" in what for what in wrong({}))


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


def test_its_own_command_leaves_nothing_to_warn_of(tmp_path: Path) -> None:
    found = doctor.examine({"plugin": "file", "root": str(tmp_path)})
    line = found[-1].what.partition("\n")[2]
    again = doctor.examine({"command": line})
    assert not [one.what for one in again if one.warning or not one.ok]


def test_a_configuration_that_the_engine_refuses_is_a_problem_in_its_words(
    tmp_path: Path,
) -> None:
    extra = {"plugin": "file", "root": str(tmp_path), "core": {"observers": ["nope"]}}
    given = collect(extra)
    with pytest.raises(KvdockError) as refused:
        Dock.for_engine(given.used, given)
    whole = json.dumps({**LOADER_KEYS, **extra})
    found = doctor.examine({"config": whole})
    assert wrong({"config": whole}) == {refused.value.what: refused.value.fix}
    assert not any("start SGLang" in one.what for one in found)


def test_a_described_model_is_routed_as_the_engine_does_it(tmp_path: Path) -> None:
    given: dict[str, object] = {
        "plugin": "file",
        "root": str(tmp_path),
        "description": "jamba-1.5-mini",
    }
    assert not wrong(given)
    said = [one.what for one in doctor.examine(given)]
    assert "pages of jamba-1.5-mini: kv to file, mamba to file" in said
    extra = json.loads(Flags.of(said[-1].partition("\n")[2]).given[EXTRA])
    assert "description" not in extra


def test_drafts_are_routed_one_by_one_as_the_engine_registers_them(
    tmp_path: Path,
) -> None:
    given: dict[str, object] = {"plugin": "file", "root": str(tmp_path)}
    asked = {**given, "description": "deepseek-v3.2"}
    said = [one.what for one in doctor.examine(asked)]
    assert "pages of a draft are looked at with --set draft=mtp" in said
    found = doctor.examine({**asked, "draft": "mtp"})
    assert any("draft to file, draft_indexer to file" in one.what for one in found)
    assert '"draft"' not in found[-1].what
    assert "has no draft 'eagle9'" in next(iter(wrong({**asked, "draft": "eagle9"})))
    assert "the draft of no model" in next(iter(wrong({**given, "draft": "mtp"})))


def test_a_draft_that_no_plugin_takes_is_a_problem_unless_drafts_are_lenient(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It stores nothing, and is only to say what it takes.
    monkeypatch.setattr(self_test, "_move_pages", lambda *_: ())
    shelf.add_backend("plain")
    asked: dict[str, object] = {
        "plugin": "plain",
        "description": "llama-3.1-8b",
        "draft": "eagle3",
    }
    (what,) = wrong(asked)
    assert "plain says nothing about draft" in what
    found = doctor.examine({**asked, "drafts": "lenient"})
    assert all(one.ok for one in found)
    (left_out,) = (one for one in found if one.warning)
    assert "pool draft is not stored" in left_out.what
    assert "plain says nothing about draft" in left_out.what


def test_ranks_of_several_hosts_need_a_store_that_all_of_them_reach(
    tmp_path: Path,
) -> None:
    config: dict[str, object] = {
        **LOADER_KEYS,
        "plugin": "file",
        "root": str(tmp_path),
    }
    flags = "--tp-size 16 --nnodes 2 --page-size 64 --enable-hierarchical-cache"
    command = f"sglang serve {flags} --hicache-storage-backend dynamic {EXTRA} "
    asked: dict[str, object] = {
        "command": command + shlex.quote(json.dumps(config)),
        "description": "deepseek-v3",
    }
    (hint,) = wrong(asked).values()
    assert '"shared_storage": true' in hint
    config["shared_storage"] = True
    asked["command"] = command + shlex.quote(json.dumps(config))
    assert not wrong(asked)


def test_without_a_model_it_says_what_it_cannot_know(tmp_path: Path) -> None:
    found = doctor.examine({"plugin": "file", "root": str(tmp_path)})
    assert any("description=MODEL" in one.what for one in found)
