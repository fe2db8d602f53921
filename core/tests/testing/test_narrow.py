"""No backend fails for what it declares as not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from repeated import OF_REFERENCES

from kvdock.testing import BackendContract

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


pytestmark = pytest.mark.slow


class _Roomy(BackendContract):
    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"store": str(tmp_path)}

    @pytest.fixture
    def small(self, tmp_path: Path) -> Mapping[str, object]:
        return {"store": str(tmp_path / "small"), "quota_bytes": 1 << 20}


@pytest.mark.repeats(*OF_REFERENCES)
class TestOneKeyAtATime(_Roomy):
    plugin = "narrow:one_key"


@pytest.mark.repeats(*OF_REFERENCES)
class TestSmallStaged(_Roomy):
    plugin = "narrow:small_staged"


@pytest.mark.repeats(*OF_REFERENCES)
class TestTouchedByALook(_Roomy):
    plugin = "narrow:touched"
