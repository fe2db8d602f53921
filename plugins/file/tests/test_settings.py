"""Settings are strict, and what they say reaches the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock.dock import Dock
from kvdock.errors import SettingsError
from kvdock.plugin.hookspecs import AttachConfig
from kvdock_file.settings import FileSettings
from kvdock_file.store import limits_of


def given(**settings: object) -> FileSettings:
    backend = Dock.load(require=["file"]).backends["file"]
    found = backend.settings(settings)
    assert isinstance(found, FileSettings)
    return found


def test_a_root_is_all_that_must_be_given(tmp_path: Path) -> None:
    settings = given(root=str(tmp_path))
    assert settings.root == tmp_path
    assert settings.quota == 0
    with pytest.raises(SettingsError, match="'root' is missing"):
        given()


def test_sizes_and_switches_may_be_text() -> None:
    settings = given(root="/x", quota="64 GiB", direct="yes", threads="3")
    assert (settings.quota, settings.direct, settings.threads) == (64 << 30, True, 3)


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'quota'"):
        given(root="/x", quotta=1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("low_watermark", 0),
        ("high_watermark", 1.5),
        ("high_watermark", 0.5),
        ("segment_bytes", 100),
        ("threads", 0),
        ("threads", 1000),
        ("quota", "much"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(setting: str, value: object) -> None:
    with pytest.raises(SettingsError):
        given(**({"root": "/x"} | {setting: value}))


def test_limits_are_those_of_the_settings() -> None:
    settings = given(
        root="/x",
        quota="1 GiB",
        free_space="2 MiB",
        high_watermark=0.9,
        low_watermark=0.8,
        segment_bytes="1 MiB",
    )
    limits = limits_of(settings)
    assert limits.quota_bytes == 1 << 30
    assert limits.free_bytes == 2 << 20
    assert (limits.high_watermark, limits.low_watermark) == (0.9, 0.8)
    assert limits.segment_bytes == 1 << 20


def test_the_probe_says_what_is_wrong_with_a_root(tmp_path: Path) -> None:
    backend = Dock.load(require=["file"]).backends["file"]
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    config = AttachConfig(settings=given(root=str(root), free_space=0))
    (finding,) = backend.probe(config)
    assert not finding.ok
    assert "others could plant pages" in finding.what
    root.chmod(0o700)
    assert all(finding.ok for finding in backend.probe(config))


def test_the_probe_tells_that_space_is_short(tmp_path: Path) -> None:
    backend = Dock.load(require=["file"]).backends["file"]
    settings = given(root=str(tmp_path / "root"), free_space="1024 TiB")
    findings = backend.probe(AttachConfig(settings=settings))
    assert [finding.ok for finding in findings] == [True, False]
    assert findings[-1].hint == "Free some space, or lower free_space."


def test_the_probe_names_what_frees_space(tmp_path: Path) -> None:
    backend = Dock.load(require=["file"]).backends["file"]
    settings = given(root=str(tmp_path / "root"), free_space="1024 TiB")
    for namespace, nbytes in (("a" * 64, 1 << 20), ("b" * 64, 1 << 21)):
        folder = tmp_path / "root" / namespace / "kv.64"
        folder.mkdir(parents=True)
        (folder / "0123456789abcdef.dat").write_bytes(bytes(nbytes))
    (tmp_path / "root").chmod(0o700)
    hint = backend.probe(AttachConfig(settings=settings))[-1].hint
    assert "2 namespaces take 3.0 MiB" in hint
    assert f"kvdock store clear {settings.root} bbbbbbbbbbbb" in hint


def test_the_probe_tries_direct_io_if_it_is_wanted(tmp_path: Path) -> None:
    backend = Dock.load(require=["file"]).backends["file"]
    settings = given(root=str(tmp_path / "root"), free_space=0, direct=True)
    findings = backend.probe(AttachConfig(settings=settings))
    assert "direct I/O" in findings[-1].what
    assert not list((tmp_path / "root").iterdir())


def test_a_root_below_the_home_directory_needs_no_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/kv")
    found = given(root="~/pages")
    assert found.root == Path("/home/kv/pages")


@pytest.mark.parametrize("root", [None, 7, ["a"]])
def test_a_root_that_is_no_path_is_refused(root: object) -> None:
    with pytest.raises(SettingsError, match="is no path"):
        given(root=root)
