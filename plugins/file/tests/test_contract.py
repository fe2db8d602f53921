"""The file backend passes the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdock.testing import BackendContract, FaultContract, Oracle
from kvdock_file.oracle import FileOracle


@pytest.mark.repeats("test_every_rank_finds_its_own_slice")
class TestFile(BackendContract):
    plugin = "file"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": tmp_path / "store", "free_space": 0}

    @pytest.fixture
    def small(self, tmp_path: Path) -> Mapping[str, object]:
        return {
            "root": tmp_path / "small",
            "free_space": 0,
            "quota": "4 MiB",
            "segment_bytes": "1 MiB",
        }

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return FileOracle(tmp_path / "store")


class TestFileUnderFaults(FaultContract):
    plugin = "file"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": tmp_path / "store", "free_space": 0}
