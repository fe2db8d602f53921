"""The file backend passes the conformance kit with sealed pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from repeated import OF_SETTINGS
from sealed import check_pages_of_a_lost_key_are_replaced

from kvdock.pools.objects import TRAILER_BYTES
from kvdock.testing import BackendContract, Oracle
from kvdock.wrappers import key_ring
from kvdock_file.oracle import FileOracle


def test_pages_of_a_destroyed_key_are_misses_that_a_put_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "_CHECK_S", 0.0)
    (tmp_path / "keys").mkdir()
    settings = {"root": tmp_path / "store", "free_space": 0}
    check_pages_of_a_lost_key_are_replaced("file", settings, tmp_path / "keys")


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
@pytest.mark.repeats(*OF_SETTINGS)
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
