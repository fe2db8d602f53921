"""The contract over a backend that notes in which test it is given a batch.

Run by test_contract.py in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from peer_reference import PeerReference
from reference import (
    FolderReference,
    FolderShelf,
    Handle,
    MemoryReference,
    ShelfOracle,
)

from kvdock import PoolKind
from kvdock.testing import BackendContract, Oracle
from kvdock.testing.contract.peers import PeerTests
from kvdock.testing.contract.reports import ReportTests
from kvdock.testing.contract.retention import RetentionTests
from kvdock.testing.contract.suite import Suite
from kvdock.testing.contract.tenants import TenantTests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock import Batch, BatchResult, Manifest

RECORD = "TESTS_OF_KVDOCK_WATCHED"
"""Names the file that it writes to."""


def note() -> None:
    """Write down which test gave a backend a batch."""
    with Path(os.environ[RECORD]).open("a") as file:
        file.write(os.environ["PYTEST_CURRENT_TEST"] + "\n")


class Watched(FolderReference):
    """A backend that does everything right, and notes by which tests it is used."""

    def manifest(self) -> Manifest:
        """Declare a kind with heads, one without, and marks: each test is met."""
        full = super().manifest()
        few = (PoolKind.MHA, PoolKind.MLA, PoolKind.LOGICAL)
        return attrs.evolve(full, kinds={kind: full.kinds[kind] for kind in few})

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        """Note the test, then do the batch."""
        note()
        return super().run(handle, batch)


class WatchedPeers(PeerReference):
    """The same for the one that sends to peers."""

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        """Note the test, then do the batch."""
        note()
        return super().run(handle, batch)


class WatchedUse(MemoryReference):
    """The same for the one that evicts by use."""

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        """Note the test, then do the batch."""
        note()
        return super().run(handle, batch)


def __getattr__(name: str) -> MemoryReference:
    if name == "plugin":
        return Watched()
    if name == "peers":
        return WatchedPeers()
    if name == "use":
        return WatchedUse()
    raise AttributeError(name)


class TestWatched(BackendContract):
    plugin = f"{__name__}:plugin"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path)}

    @pytest.fixture
    def small(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path / "small"), "quota_bytes": 1 << 20}

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return ShelfOracle(FolderShelf(tmp_path))


class TestWatchedUse(ReportTests, RetentionTests, TenantTests, Suite, sealed=True):
    plugin = f"{__name__}:use"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": f"small {request.node.name}", "quota_bytes": 1 << 20}


class TestWatchedPeers(PeerTests, Suite, sealed=True):
    plugin = f"{__name__}:peers"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}
