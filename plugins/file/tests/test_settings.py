"""Settings are checked, and reach the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock import AttachConfig, Dock, Finding
from kvdock.errors import SettingsError
from kvdock_file.settings import FileSettings


def given(**settings: object) -> FileSettings:
    backend = Dock.load(require=["file"]).backends["file"]
    found = backend.settings(settings)
    assert isinstance(found, FileSettings)
    return found


def test_only_the_root_is_required(tmp_path: Path) -> None:
    settings = given(root=str(tmp_path))
    assert settings.root == tmp_path
    assert settings.quota == 0
    with pytest.raises(SettingsError, match="'root' is missing"):
        given()


def test_sizes_and_booleans_may_be_text() -> None:
    settings = given(root="/x", quota="64 GiB", direct="yes", threads="3")
    assert (settings.quota, settings.direct, settings.threads) == (64 << 30, True, 3)


def test_an_unknown_setting_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'quota'"):
        given(root="/x", quotta=1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("segment_bytes", 100),
        ("threads", 0),
        ("threads", 1000),
        ("quota", "much"),
    ],
)
def test_values_out_of_range_are_rejected(setting: str, value: object) -> None:
    with pytest.raises(SettingsError):
        given(**({"root": "/x"} | {setting: value}))


def test_the_limits_of_the_store_follow_the_settings() -> None:
    settings = given(
        root="/x",
        quota="1 GiB",
        free_space="2 MiB",
        segment_bytes="1 MiB",
    )
    assert settings.quota == 1 << 30
    assert settings.free_space == 2 << 20
    assert settings.segment_bytes == 1 << 20


def test_the_probe_checks_the_root_with_the_settings(tmp_path: Path) -> None:
    backend = Dock.load(require=["file"]).backends["file"]
    root = tmp_path / "root"

    def probe(**settings: object) -> list[Finding]:
        found = given(root=str(root), **settings)
        return list(backend.probe(AttachConfig(settings=found)))

    assert [finding.ok for finding in probe(free_space=0)] == [True, True]
    assert [finding.ok for finding in probe(free_space="1024 TiB")] == [True, False]
    assert "direct I/O" in probe(direct=True)[-1].what
    assert not root.exists()
    root.mkdir()
    root.chmod(0o777)
    (finding,) = probe()
    assert "others could plant pages" in finding.what
    assert all(finding.ok for finding in probe(free_space=0, shared_root=True))


def test_a_tilde_in_the_root_is_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/kv")
    found = given(root="~/pages")
    assert found.root == Path("/home/kv/pages")


@pytest.mark.parametrize("root", [None, 7, ["a"], "", "a\0b", "\ud800", b"root"])
def test_a_root_that_is_not_a_path_is_rejected(root: object) -> None:
    with pytest.raises(SettingsError, match="is not a path"):
        given(root=root)
    with pytest.raises(SettingsError, match="is not a path"):
        FileSettings(root=root)  # type: ignore[arg-type]  # as code may give it
