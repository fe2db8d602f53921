"""The kit passes on correct backends."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from reference import FolderShelf, ShelfOracle
from server_reference import ServerOracle
from shelf_server import Servers, running

from kvdock.testing import BackendContract, FaultContract, Oracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@pytest.mark.repeats("RetentionTests")
class TestMemory(BackendContract):
    plugin = "reference:memory"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"quota_bytes": 1 << 20, "store": f"small {request.node.name}"}


@pytest.mark.slow
class TestHooks(BackendContract):
    plugin = "reference:hooks"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"quota_bytes": 1 << 20, "store": f"small {request.node.name}"}


@pytest.mark.slow
class TestOwnMemory(BackendContract):
    plugin = "allocating_reference:plugin"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"quota_bytes": 1 << 20, "store": f"small {request.node.name}"}


@pytest.mark.slow
class TestPeers(BackendContract):
    plugin = "peer_reference:peers"

    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"quota_bytes": 1 << 20, "store": f"small {request.node.name}"}


@pytest.mark.slow
class TestFolder(BackendContract):
    plugin = "reference:folder"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path)}

    @pytest.fixture
    def small(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path / "small"), "quota_bytes": 1 << 20}

    @pytest.fixture
    def oracle(self, tmp_path: Path) -> Oracle:
        return ShelfOracle(FolderShelf(tmp_path))


@pytest.mark.slow
class TestServer(BackendContract):
    plugin = "server_reference:plugin"

    @pytest.fixture
    def servers(self, tmp_path: Path) -> Iterator[Servers]:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        with running(*map(str, folders)) as servers:
            yield servers

    @pytest.fixture
    def config(self, servers: Servers) -> Mapping[str, object]:
        return {"store": servers.addresses}

    @pytest.fixture
    def oracle(self, servers: Servers) -> Iterator[Oracle]:
        with closing(ServerOracle(servers)) as oracle:
            yield oracle


@pytest.mark.slow
class TestMemoryUnderFaults(FaultContract):
    plugin = "reference:memory"


@pytest.mark.slow
class TestFolderUnderFaults(FaultContract):
    plugin = "reference:folder"

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        return {"root": str(tmp_path)}
