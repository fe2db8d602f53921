"""SGLang's own storage class as a backend: the conformance kit on `HiCacheFile`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from repeated import OF_SETTINGS

from kvdock.testing import BackendContract

pytest.importorskip("kvdock_hicache")


# Stand-ins for this class prove them in the tests of the plugin.
@pytest.mark.repeats(*OF_SETTINGS)
class TestHiCacheFile(BackendContract):
    plugin = "hicache"
    large_objects = False

    @pytest.fixture(params=["generic", pytest.param("v2", marks=pytest.mark.long)])
    def config(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Mapping[str, object]:
        return {
            "storage_class": "sglang.srt.mem_cache.hicache_storage:HiCacheFile",
            "extra_config": {"file_storage_path": str(tmp_path / "store")},
            "form": request.param,
            "memory": "32 MiB",
        }
