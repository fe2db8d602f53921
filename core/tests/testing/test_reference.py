"""The kit passes on correct backends."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from reference import FolderShelf, ShelfOracle
from repeated import OF_FOLDERS, OF_REFERENCES, OF_SETTINGS
from server_reference import ServerOracle
from shelf_server import Servers, running

from kvdock.testing import BackendContract, FaultContract, Oracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class _InMemory(BackendContract):
    @pytest.fixture
    def config(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"store": request.node.name}

    @pytest.fixture
    def small(self, request: pytest.FixtureRequest) -> Mapping[str, object]:
        return {"quota_bytes": 1 << 20, "store": f"small {request.node.name}"}


@pytest.mark.repeats("RetentionTests")
class TestMemory(_InMemory):
    plugin = "reference:memory"


@pytest.mark.slow
@pytest.mark.repeats(*OF_REFERENCES)
class TestHooks(_InMemory):
    plugin = "reference:hooks"


@pytest.mark.slow
@pytest.mark.repeats(*OF_REFERENCES)
class TestOwnMemory(_InMemory):
    plugin = "allocating_reference:plugin"


@pytest.mark.slow
@pytest.mark.repeats(*OF_REFERENCES)
class TestPeers(_InMemory):
    plugin = "peer_reference:peers"


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS, *OF_FOLDERS)
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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folders = [tmp_path_factory.mktemp("shelf") for _ in range(2)]
    with running(*map(str, folders)) as servers:
        yield servers


@pytest.mark.slow
@pytest.mark.repeats(*OF_SETTINGS)
class TestServer(BackendContract):
    plugin = "server_reference:plugin"
    tidy = True

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
@pytest.mark.repeats(*OF_REFERENCES)
class TestOneKeyAtATime(_InMemory):
    """No backend fails for what it declares as not supported."""

    plugin = "narrow:one_key"


@pytest.mark.slow
@pytest.mark.repeats(*OF_REFERENCES)
class TestSmallStaged(_InMemory):
    plugin = "narrow:small_staged"


@pytest.mark.slow
@pytest.mark.repeats(*OF_REFERENCES)
class TestTouchedByALook(_InMemory):
    plugin = "narrow:touched"
