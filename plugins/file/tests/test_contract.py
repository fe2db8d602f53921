"""The file backend holds the whole contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdock.testing import BackendContract


class TestFile(BackendContract):
    plugin = "file"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path / "store")}
