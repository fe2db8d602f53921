"""The file backend holds the whole contract."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdock.segments.inspect import Location, locate
from kvdock.testing import BackendContract, Oracle


class SegmentOracle(Oracle):
    """Reads and damages slots of segment files, and the records about them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _place(self, key: str) -> Location:
        (place,) = locate(self.root, key)
        return place

    def peek(self, key: str) -> bytes | None:
        places = locate(self.root, key)
        if not places:
            return None
        with places[0].path.open("rb") as file:
            return os.pread(file.fileno(), places[0].nbytes, places[0].offset)

    def poke(self, key: str, offset: int, data: bytes) -> None:
        place = self._place(key)
        with place.path.open("r+b") as file:
            os.pwrite(file.fileno(), data, place.offset + offset)

    def resize(self, key: str, nbytes: int) -> None:
        # A slot has no end of its own; a file may well be cut within one.
        place = self._place(key)
        if nbytes > place.nbytes:
            raise NotImplementedError("extend a slot")
        self.poke(key, nbytes, b"\xee" * (place.nbytes - nbytes))

    def swap(self, key: str, other: str) -> None:
        one, two = self.peek(key), self.peek(other)
        assert one
        assert two
        self.poke(key, 0, two)
        self.poke(other, 0, one)

    def remove(self, key: str) -> None:
        place = self._place(key)
        with place.path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes(place.nbytes), place.offset)


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
        return SegmentOracle(tmp_path / "store")
