"""What the doctor of a backend on segments says about a root."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvdock_segments import check_root


def test_a_root_that_others_can_write_is_the_only_finding(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    (finding,) = check_root(root)
    assert not finding.ok
    assert "others could plant pages" in finding.what
    assert check_root(root, shared=True)[0].ok
    root.chmod(0o700)
    assert all(finding.ok for finding in check_root(root))


def test_a_root_that_others_can_replace_is_reported(tmp_path: Path) -> None:
    exposed = tmp_path / "exposed"
    exposed.mkdir()
    exposed.chmod(0o777)
    finding = check_root(exposed / "root")[0]
    assert not finding.ok
    assert f"everyone may write {exposed}" in finding.what
    assert "chmod +t" in finding.hint
    assert check_root(exposed / "root", shared=True)[0].ok


def test_too_little_space_is_reported(tmp_path: Path) -> None:
    findings = check_root(tmp_path / "root", free_bytes=1 << 50)
    assert [finding.ok for finding in findings] == [True, False]
    assert findings[-1].what.startswith("0 B to use: ")
    assert "of which 1024.0 TiB are left" in findings[-1].what
    assert "lower free_space" in findings[-1].hint


@pytest.mark.parametrize(("files", "left", "few"), [(0, 0, 0), (9000, 255, 1)])
def test_a_file_system_that_takes_no_more_files_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, left: int, few: int
) -> None:
    status = list(os.statvfs(tmp_path))
    status[5], status[7] = files, left
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(status))
    findings = check_root(tmp_path / "root")
    assert sum("takes 255 more files" in one.what for one in findings) == few
    assert sum(not one.ok for one in findings) == few


def test_the_command_that_frees_space_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for namespace, nbytes in (("a" * 64, 1 << 20), ("b" * 64, 1 << 21)):
        folder = root / namespace / "kv.64"
        folder.mkdir(parents=True)
        (folder / "0123456789abcdef.dat").write_bytes(bytes(nbytes))
    root.chmod(0o700)
    hint = check_root(root, free_bytes=1 << 50)[-1].hint
    assert "2 namespaces take 3.0 MiB" in hint
    assert f"kvdock store rm {root} bbbbbbbbbbbb" in hint


def test_direct_io_is_tried_and_leaves_no_file(tmp_path: Path) -> None:
    findings = check_root(tmp_path / "root", direct=True)
    assert "direct I/O" in findings[-1].what
    assert not list(tmp_path.iterdir())


def test_a_missing_root_is_missing_afterwards(tmp_path: Path) -> None:
    findings = check_root(tmp_path / "far" / "root")
    assert all(finding.ok for finding in findings)
    assert "will be created" in findings[0].what
    assert not list(tmp_path.iterdir())


def test_a_root_below_a_file_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = check_root(tmp_path / "file" / "root")
    assert not finding.ok
    assert "cannot be opened: Not a directory" in finding.what


def test_a_file_system_without_direct_io_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_open = os.open

    def refuse(path: Any, flags: int, *more: Any, **words: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return to_open(path, flags, *more, **words)

    monkeypatch.setattr(os, "open", refuse)
    finding = check_root(tmp_path / "root", direct=True)[-1]
    assert not finding.ok
    assert finding.hint == "Set direct to false, or use another file system."
