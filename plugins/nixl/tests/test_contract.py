"""The nixl backend passes the conformance kit, with each way of moving bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdock.testing import BackendContract, FaultContract, Oracle
from kvdock_nixl.oracle import NixlOracle


class TestIOUring(BackendContract):
    plugin = "nixl"

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
        return NixlOracle(tmp_path / "store")
