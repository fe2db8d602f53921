"""`kvdock config init`, `set` and `validate`: files of settings."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from golden import check_report
from hypothesis import given
from hypothesis import strategies as st
from tried import try_installed_once

from kvdock.errors import KvdockError, PluginError, SettingsError
from kvdock_cli import settings_file
from kvdock_cli.commands import config
from kvdock_cli.output import UsageProblem
from kvdock_cli.reports import config as report

DOCUMENTATION = (
    Path(__file__).parents[2] / "docs" / "reference" / "cli-json.md"
).read_text()
TEXT = """\
# Ours.
[core]
integrity = "auto"   # the default

[core.deadlines]   # short
put = "4 s"
get = "3 s"

[backends.file]
# On the fast disk.
root = "/srv/kv"
"""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load what these tests use, and try it once."""
    try_installed_once(monkeypatch)
    monkeypatch.setenv("KVDOCK_PLUGINS", "file,s3")


Answer = Callable[..., tuple[dict[str, Any], int]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvdock.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Answer:
    def run(
        command: Callable[..., int], *words: object, **options: Any
    ) -> tuple[dict[str, Any], int]:
        code = command(*words, json=True, **options)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert f"`{found['schema']}`" in DOCUMENTATION
        assert all(f"`{key}`" in DOCUMENTATION for key in found)
        return found, code

    return run


@pytest.mark.parametrize("backend", ["file", "hf3fs", "mooncake", "nixl", "s3"])
def test_a_new_file_changes_nothing_with_and_without_its_marks(
    backend: str, tmp_path: Path, ask: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDOCK_PLUGINS", backend)
    path = tmp_path / "kvdock.toml"
    found, code = ask(config.init, (backend,), config=path)
    assert (code, found["backends"]) == (0, [backend])
    plain = tomllib.loads(path.read_text())
    assert plain == {"core": {"deadlines": {}}, "backends": {backend: {}}}
    # Each default, as it is written there, is a value that its setting takes.
    path.write_text(re.sub(r"^#(?=\w+ = )", "", path.read_text(), flags=re.MULTILINE))
    wrong, _ = ask(config.validate, config=path)
    keys = {one["key"] for one in wrong["wrong"]}
    assert keys <= {*found["missing"], f"backends.{backend}"}


def test_a_file_that_is_there_is_overwritten_only_by_force(file: Path) -> None:
    with pytest.raises(UsageProblem, match="is there"):
        config.init(("file",), config=file)
    assert file.read_text() == TEXT
    assert config.init(("file",), config=file, force=True) == 0
    assert file.read_text() != TEXT


def test_a_new_file_names_installed_backends_only(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no backend 'fil'") as caught:
        config.init(("fil",), config=tmp_path / "new.toml")
    assert "Did you mean 'file'?" in caught.value.fix
    assert not [*tmp_path.iterdir()]


def test_a_change_keeps_comments_order_mode_and_links(
    file: Path, tmp_path: Path, ask: Answer
) -> None:
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    found, code = ask(config.change, "core.deadlines.put", "9 s", config=link)
    assert (code, found["key"]) == (0, "core.deadlines.put")
    assert file.read_text() == TEXT.replace("4 s", "9 s")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert {one.name for one in tmp_path.iterdir()} == {file.name, link.name}


@pytest.mark.parametrize(
    ("key", "value", "typed"),
    [
        ("core.breaker.failures", "7", 7),
        ("core.self_test", "true", True),
        ("core.integrity", "off", "off"),
        ("core.observers", '["metrics"]', ["metrics"]),
        ("core.peers.key_file", "1.10", "1.10"),
        ("backends.file.quota", "20 GiB", "20 GiB"),
        ("backends.disk.plugin", "file", "file"),
    ],
)
def test_a_value_is_written_as_its_setting_takes_it(
    key: str, value: str, typed: object, file: Path
) -> None:
    assert config.change(key, value, config=file) == 0
    found: Any = tomllib.loads(file.read_text())
    for word in key.split("."):
        found = found[word]
    assert found == typed
    assert type(found) is type(typed)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("core.deadlines.gett", "1 s", "Did you mean 'get'?"),
        ("cor.deadlines.get", "1 s", "Did you mean 'core'?"),
        ("backends.fil.root", "/x", "Did you mean 'file'?"),
        ("backends.file.rot", "/x", "Did you mean 'root'?"),
        ("core.observers", '["metrix"]', "Did you mean 'metrics'?"),
        ("core.deadlines.get", "soon", "Write it like"),
        ("core.deadlines", "5", ""),
        ("backends", "5", ""),
        ("core.integrity.more", "5", ""),
        ("backends.s3.access_key_id", "mine", "Give both"),
    ],
)
def test_a_change_that_would_be_wrong_is_not_written(
    key: str, value: str, fix: str, file: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        config.change(key, value, config=file)
    assert fix in caught.value.fix
    assert file.read_text() == TEXT


def test_a_file_that_is_wrong_elsewhere_can_be_mended_step_by_step(
    file: Path,
) -> None:
    file.write_text(TEXT.replace('"auto"', '"auot"').replace('"3 s"', '"3 x"'))
    assert config.change("core.integrity", "off", config=file) == 0
    assert config.change("core.deadlines.get", "1 s", config=file) == 0
    assert config.validate(config=file) == 0


def test_every_problem_is_named_with_its_key(file: Path, ask: Answer) -> None:
    assert ask(config.validate, config=file) == (
        {"schema": "kvdock.config-validate/1", "ok": True}
        | {"path": str(file), "wrong": []},
        0,
    )
    file.write_text(
        TEXT.replace('"auto"', '"auot"').replace("put", "putt").replace("3 s", "3 x")
        + 'thread = 2\ndirect = "maybe"\n[observers.metrix]\n[corre]\nx = 1\n'
    )
    found, code = ask(config.validate, config=file)
    assert code == 1
    assert {one["key"] for one in found["wrong"]} == {
        "core.integrity",
        "core.deadlines.putt",
        "core.deadlines.get",
        "backends.file.thread",
        "backends.file.direct",
        "observers.metrix",
        "corre.x",
    }
    assert found["path"] == str(file)


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("[backends.file]\n", "backends.file.root", "it is missing"),
        ('[core]\nobservers = ["metrix"]\n', "core.observers", "no observer 'metrix'"),
        ("[backends]\nfile = 3\n", "backends.file", "is not made of settings"),
        ('[backends.disk]\nplugin = "fiel"\n', "backends.disk", "fiel"),
        ('[tenants.a]\nquota = "1 GB"\n', "tenants.a", "names not one salt"),
        ("a = = 1\n", "", "cannot be read"),
    ],
)
def test_what_lies_between_settings_is_judged_as_well(
    text: str, key: str, what: str, file: Path, ask: Answer
) -> None:
    file.write_text(text)
    found, code = ask(config.validate, config=file)
    (wrong,) = found["wrong"]
    assert (code, wrong["key"]) == (1, key)
    assert what in wrong["what"]


def test_tenants_are_right_as_documented(file: Path, ask: Answer) -> None:
    documented = (
        '[tenants.acme]\nsalt = "s"\nquota = "200 GiB"\nretained_share = 0.25\n'
        '[tenants.default]\nquota = "50 GiB"\n'
    )
    file.write_text(documented)
    assert ask(config.validate, config=file)[1] == 0
    file.write_text(documented + '[tenants.bell]\nsalt = "s"\n')
    (wrong,) = ask(config.validate, config=file)[0]["wrong"]
    assert "'acme' and 'bell' have one salt" in wrong["what"]


def test_the_environment_may_give_what_a_file_lacks(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[backends.file]\nthreads = 2\n")
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert config.validate() == 1
    monkeypatch.setenv("KVDOCK_BACKENDS__FILE__ROOT", "/srv/kv")
    assert config.validate() == 0


def test_a_file_that_is_missing_or_not_named_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVDOCK_CONFIG", raising=False)
    with pytest.raises(UsageProblem, match="no file is named"):
        config.validate()
    with pytest.raises(SettingsError, match="is missing"):
        config.validate(config=tmp_path / "none.toml")
    with pytest.raises(SettingsError, match="is missing"):
        config.change("core.integrity", "off", config=tmp_path / "none.toml")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KvdockError, match="cannot be written"):
        config.init((), config=tmp_path / "none" / "kvdock.toml")


def test_the_table_of_problems_names_the_file_and_fits() -> None:
    what = "core: unknown setting 'integrty' (file /srv/kvdock.toml)"
    wrong = [
        settings_file.Wrong("core.integrty", what, "Did you mean 'integrity'?"),
        settings_file.Wrong("backends.file.root", "it is missing", "Give it here."),
    ]
    check_report(GOLDEN / "config-validate.txt", report.wrong(Path("kv.toml"), wrong))
    assert report.wrong(Path("kv.toml"), []).text() == "kv.toml is right"


GOLDEN = Path(__file__).with_name("golden")
NAMES = st.sampled_from(["core", "a", "b", "c"])
VALUES = st.booleans() | st.integers(-9, 9) | st.text("a \"'\\#=[", max_size=5)
TREES = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=3),
    lambda below: st.dictionaries(NAMES, VALUES | below, max_size=3),
    max_leaves=6,
)


def at(tree: Any, path: list[str]) -> Any:
    """Return what lies in a place; an empty group where nothing does."""
    for word in path:
        tree = tree.get(word, {}) if isinstance(tree, dict) else None
    return tree


@given(tree=TREES, path=st.lists(NAMES, min_size=1, max_size=3), value=VALUES)
def test_a_change_of_any_file_changes_one_setting_or_is_rejected(
    tree: dict[str, Any], path: list[str], value: object
) -> None:
    text = "# first\n" + tomlkit.dumps(tree) + "\n# last\n"
    try:
        fresh = settings_file.changed(text, path, value)
    except SettingsError:
        assert not isinstance(at(tree, path[:-1]), dict)
        return
    assert tomllib.loads(fresh) == settings_file.with_value(tree, path, value)
    assert fresh.startswith("# first\n")
    # A comment in a group that a value replaces goes with it.
    assert isinstance(at(tree, path), dict) or "# last\n" in fresh


def test_a_file_without_rights_for_others_stays_so(file: Path) -> None:
    file.chmod(0o600)
    config.change("core.integrity", "off", config=file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_uid == os.getuid()


WRONG_TIER = "tiers names it, and no backend 'naer' is installed"


def test_a_tier_that_is_not_a_backend_is_a_problem_of_the_file(
    tmp_path: Path, ask: Answer
) -> None:
    path = tmp_path / "kvdock.toml"
    backend = '[backends.near]\nplugin = "file"\nroot = "/srv/kv"\n'
    for tiers, wrong in (("near", ""), ("naer", WRONG_TIER)):
        path.write_text(f'tiers = ["{tiers}"]\n{backend}')
        found, code = ask(config.validate, config=path)
        assert [one["what"] for one in found["wrong"]] == [wrong] * code


def test_a_wrapper_that_is_not_installed_is_a_problem_of_the_file(
    file: Path, ask: Answer
) -> None:
    file.write_text('[backends.file]\nroot = "/srv/kv"\nwrap = ["nope"]\n')
    found, code = ask(config.validate, config=file)
    (wrong,) = found["wrong"]
    assert (code, "no wrapper 'nope' is installed" in wrong["what"]) == (1, True)
