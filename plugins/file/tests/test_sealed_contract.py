"""The file backend passes the conformance kit with sealed pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdock.pools.objects import TRAILER_BYTES
from kvdock.testing import BackendContract, Oracle
from kvdock_file.oracle import FileOracle


class SealedOracle(FileOracle):
    """Sees objects without their trailers."""

    def peek(self, key: str) -> bytes | None:
        data = super().peek(key)
        return data and data[:-TRAILER_BYTES]

    def resize(self, key: str, nbytes: int) -> None:
        # What is cut off is cut from the object, and what comes is behind its trailer.
        more = TRAILER_BYTES if nbytes > len(self.peek(key) or b"") else 0
        super().resize(key, nbytes + more)


@pytest.mark.slow
class TestSealedFile(BackendContract):
    plugin = "sealed:file"

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
        return SealedOracle(tmp_path / "store")
