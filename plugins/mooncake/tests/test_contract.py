"""The conformance kit, against a master and an owner that outlive each test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvdock.testing import BackendContract
from kvdock_mooncake.server import start_master, start_owner

pytestmark = [pytest.mark.mooncake, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(library: Any) -> Iterator[str]:
    """A master whose memory belongs to a process of its own."""
    del library
    master = start_master()
    owner = start_owner(master.address, 512 << 20)
    yield master.address
    owner.stop()
    master.stop()


class TestMooncake(BackendContract):
    plugin = "mooncake"

    @pytest.fixture
    def config(self, cluster: str) -> Mapping[str, object]:
        return {"master": cluster, "segment_bytes": 0}
