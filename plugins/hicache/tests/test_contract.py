"""Stand-ins for SGLang's classes pass the conformance kit, in each form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import hicache_standins as standins
import pytest
from repeated import OF_RANKS, OF_SETTINGS

from kvdock.testing import BackendContract


def settings_of(cls: type, space: str, **more: object) -> Mapping[str, object]:
    return {
        "storage_class": f"hicache_standins:{cls.__name__}",
        "extra_config": {"space": space},
        "memory": "32 MiB",
        **more,
    }


@pytest.fixture
def space(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    standins.SPACES.pop(str(tmp_path), None)


@pytest.mark.repeats(*OF_RANKS)
class TestGeneric(BackendContract):
    plugin = "hicache"
    stays_s = 0.5  # in this process nothing expires

    @pytest.fixture
    def config(self, space: str) -> Mapping[str, object]:
        return settings_of(standins.Shelf, space)


@pytest.mark.slow
@pytest.mark.long
class TestV1(BackendContract):
    plugin = "hicache"
    large_objects = False

    @pytest.fixture
    def config(self, space: str) -> Mapping[str, object]:
        return settings_of(standins.Pointers, space)


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestV2(BackendContract):
    plugin = "hicache"
    large_objects = False

    @pytest.fixture
    def config(self, space: str) -> Mapping[str, object]:
        return settings_of(standins.Transfers, space, form="v2")
