"""A mount of 3FS for each test: a real one if it is named, else a fake."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import threefs

threefs.use()


def pytest_configure() -> None:
    """Say what is missing before the first test, and not in each of them."""
    if threefs.REAL and (
        problem := threefs.problem_of(threefs.REAL, posix_only=threefs.POSIX_ONLY)
    ):
        raise pytest.UsageError(problem)


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return threefs.mounted(tmp_path / "mnt")


@pytest.fixture
def root(mount: Path) -> Iterator[Path]:
    one = threefs.root_in(mount)
    yield one
    shutil.rmtree(one, ignore_errors=True)


@pytest.fixture
def fake() -> Iterator[Any]:
    """The fake's module; what goes wrong in a test ends with it."""
    if threefs.REAL:
        pytest.skip("runs on the fake alone")
    from hf3fs_fuse import io

    io.KNOBS.reset()
    yield io
    io.KNOBS.reset()
    io.KNOBS.find()
