"""The hf3fs backend passes the conformance kit in both modes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import threefs
from repeated import OF_SEGMENTS, OF_SETTINGS

from kvdock.config import structure
from kvdock.testing import BackendContract, FaultContract, Oracle
from kvdock_hf3fs.oracle import Hf3fsOracle
from kvdock_hf3fs.settings import Hf3fsSettings

LITTLE = {"quota": "4 MiB", "segment_bytes": "1 MiB", "chunk": "64 KiB"}


def oracle_of(given: Mapping[str, object]) -> Oracle:
    return Hf3fsOracle(structure(Hf3fsSettings, given, where="tests"))


@pytest.mark.repeats(*OF_SEGMENTS)
class TestUsrbio(BackendContract):
    plugin = "hf3fs"

    @pytest.fixture
    def config(self, root: Path) -> Mapping[str, object]:
        return {"root": root, "free_space": 0}

    @pytest.fixture
    def small(self, mount: Path) -> Iterator[Mapping[str, object]]:
        root = threefs.root_in(mount)
        yield {"root": root, "free_space": 0, **LITTLE}
        shutil.rmtree(root, ignore_errors=True)

    @pytest.fixture
    def oracle(self, config: Mapping[str, object]) -> Oracle:
        return oracle_of(config)


@pytest.mark.slow
class TestUsrbioUnderFaults(FaultContract):
    plugin = "hf3fs"

    @pytest.fixture
    def config(self, root: Path) -> Mapping[str, object]:
        return {"root": root, "free_space": 0}


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestPosix(BackendContract):
    plugin = "hf3fs"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Iterator[Path]:
        folder = threefs.folder_in(tmp_path)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)

    @pytest.fixture
    def config(self, folder: Path) -> Mapping[str, object]:
        return {"root": folder / "store", "mode": "posix", "free_space": 0}

    @pytest.fixture
    def small(self, folder: Path) -> Mapping[str, object]:
        small = {"root": folder / "small", "mode": "posix", "free_space": 0, **LITTLE}
        # It promises nothing without them.
        return {"locks": True, **small}

    @pytest.fixture
    def oracle(self, config: Mapping[str, object]) -> Oracle:
        return oracle_of(config)
