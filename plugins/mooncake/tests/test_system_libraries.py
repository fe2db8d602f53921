"""System libraries that are brought without root."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock_mooncake import system_libraries


def test_nothing_is_done_where_everything_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_libraries, "missing", list)
    monkeypatch.setattr(system_libraries, "bring", lambda: pytest.fail("not needed"))
    assert system_libraries.main() == 0
    assert "are here" in capsys.readouterr().out


def test_where_it_cannot_be_brought_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_libraries, "missing", lambda: ["libibverbs.so.1"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert system_libraries.main() == 1
    told = capsys.readouterr().err
    assert "there is no apt-get" in told
    assert "libibverbs1" in told


def test_packages_are_downloaded_and_unpacked_below_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], folder: str) -> None:
        commands.append(command)
        if "download" in command:
            (Path(folder) / "libibverbs1_1.deb").touch()

    monkeypatch.setattr(system_libraries, "NATIVE_FOLDER", tmp_path / "own")
    monkeypatch.setattr(system_libraries, "_run", run)
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}")
    system_libraries.bring()
    assert commands[0][-1] == "libibverbs1"
    assert commands[1][:2] == ["dpkg", "-x"]
    assert commands[1][-1] == str(tmp_path / "own")
