"""The contract of a chain passes on chains of a right backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reference import FolderShelf, ShelfOracle

from kvdock.testing import Oracle, TierContract

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.mark.slow
class TestThreeTiersInMemory(TierContract):
    plugin = "reference:memory"
    tiers = ("near", "disk", "far")

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {
            name: {"plugin": self.plugin, "store": str(tmp_path / name)}
            for name in self.tiers
        }


class TestFoldersBehindMemory(TierContract):
    plugin = "reference:memory"
    tiers = ("near", "far")
    tidy = True

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        folder = "reference:folder"
        return {
            "near": {"plugin": self.plugin, "store": str(tmp_path / "near")},
            "far": {"plugin": folder, "root": str(tmp_path / "far")},
        }

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return ShelfOracle(FolderShelf(tmp_path / "far"))


@pytest.mark.slow
class TestSealedFoldersBehindMemory(TierContract):
    plugin = "reference:memory"
    tiers = ("near", "disk", "far")

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        folder = "sealed:folder"
        return {
            "near": {"plugin": self.plugin, "store": str(tmp_path / "near")},
            "disk": {"plugin": folder, "root": str(tmp_path / "disk")},
            "far": {"plugin": folder, "root": str(tmp_path / "far")},
        }

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return ShelfOracle(FolderShelf(tmp_path / "far"))
