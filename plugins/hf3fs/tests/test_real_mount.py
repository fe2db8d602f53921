"""`make test-hf3fs MOUNT=...` says what is missing before it runs a test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import threefs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(bool(threefs.REAL), reason="needs the fake")


def test_a_mount_of_3fs_is_accepted(mount: Path) -> None:
    assert not threefs.problem_of(str(mount))


@pytest.mark.parametrize("name", ["3fs-virt", "missing"])
def test_a_path_that_is_not_a_mount_point_is_rejected(mount: Path, name: str) -> None:
    assert "mount point" in threefs.problem_of(str(mount / name))


def test_another_file_system_is_for_mode_posix_alone(tmp_path: Path) -> None:
    problem = threefs.problem_of(str(tmp_path))
    assert "is not a mount point of 3FS" in problem
    assert "MODE=posix" in problem
    assert not threefs.problem_of(str(tmp_path), posix_only=True)


def test_without_the_module_the_problem_says_how_to_get_it(
    mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", None)
    problem = threefs.problem_of(str(mount))
    assert "hf3fs_fuse.io cannot be imported" in problem
    assert "build it" in problem
    assert "MODE=posix" in problem
    assert not threefs.problem_of(str(mount), posix_only=True)
