"""The nixl backend passes the conformance kit, with each way of moving bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from repeated import OF_SEGMENTS, OF_SETTINGS

from kvdock.testing import BackendContract, FaultContract, Oracle
from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.oracle import NixlOracle


@pytest.fixture(autouse=True)
def moved() -> Iterator[None]:
    """No byte moves past NIXL, whatever is broken, evicted or late."""
    before = MOVED.read()
    yield
    after = MOVED.read()
    past = {
        way: after[way] - before[way] for way in (Way.KERNEL_READ, Way.KERNEL_WRITE)
    }
    assert not any(past.values()), past


class NixlContract(BackendContract):
    plugin = "nixl"
    more: Mapping[str, object] = MappingProxyType({})

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": tmp_path / "store", "free_space": 0, **self.more}

    @pytest.fixture
    def small(self, tmp_path: Path) -> Mapping[str, object]:
        return {
            "root": tmp_path / "small",
            "free_space": 0,
            "quota": "4 MiB",
            "segment_bytes": "1 MiB",
            **self.more,
        }

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return NixlOracle(tmp_path / "store")


@pytest.mark.repeats(*OF_SEGMENTS)
class TestIOUring(NixlContract):
    pass


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestAIO(NixlContract):
    more = MappingProxyType({"io": "aio", "direct": True})


@pytest.mark.slow
class TestNixlUnderFaults(FaultContract):
    plugin = "nixl"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": tmp_path / "store", "free_space": 0}
