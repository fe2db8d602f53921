"""The contract as a test class for every mutant; run by `__main__` only."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from reference import FolderShelf
from server_reference import ServerOracle
from shelf_server import Servers, running

from kvdock.testing.contract import BackendContract, FaultContract, TierContract
from mutants import MUTANTS
from mutants.mutant import FolderMutant, Mutant, ServerMutant, word_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvdock.testing.oracles import Oracle


def class_of(mutant: Mutant) -> str:
    """Return the name of a mutant's test class."""
    return f"Test{mutant.__name__}"


Contract = type[BackendContract | FaultContract | TierContract]

TIERS = ("near", "far")


def contract_of(mutant: Mutant) -> Contract:
    """Return the contract that has the test by which a mutant is caught."""
    contracts: tuple[Contract, ...] = (BackendContract, FaultContract, TierContract)
    return next(one for one in contracts if hasattr(one, mutant.caught_by))


def _tiers(mutant: Mutant) -> Contract:
    word = f"mutants:{word_of(mutant)}"
    folder = issubclass(mutant, FolderMutant)

    @pytest.fixture
    def config(self: object, tmp_path: Path) -> Mapping[str, object]:
        del self
        place = "root" if folder else "store"
        return {name: {"plugin": word, place: str(tmp_path / name)} for name in TIERS}

    @pytest.fixture
    def oracle(self: object, tmp_path: Path) -> Oracle | None:
        del self
        if not issubclass(mutant, FolderMutant):
            return None
        return mutant.oracle(FolderShelf(tmp_path / TIERS[-1]))

    return type(
        class_of(mutant),
        (TierContract,),
        {"plugin": word, "tiers": TIERS, "config": config, "oracle": oracle},
    )


def _served(mutant: type[ServerMutant]) -> Contract:
    """Return the contract of a mutant over servers of its own."""

    @pytest.fixture
    def servers(self: object, tmp_path: Path) -> Iterator[Servers]:
        del self
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        with running(*(str(one) if mutant.keeps else "" for one in folders)) as found:
            yield found

    @pytest.fixture
    def config(self: object, servers: Servers) -> Mapping[str, object]:
        del self
        return {"store": servers.addresses}

    @pytest.fixture
    def oracle(self: object, servers: Servers) -> Iterator[Oracle]:
        del self
        with closing(ServerOracle(servers)) as oracle:
            yield oracle

    return type(
        class_of(mutant),
        (contract_of(mutant),),
        {
            "plugin": f"mutants:{word_of(mutant)}",
            "servers": servers,
            "config": config,
            "oracle": oracle,
        },
    )


def _suite(mutant: Mutant) -> Contract:
    if contract_of(mutant) is TierContract:
        return _tiers(mutant)
    if issubclass(mutant, ServerMutant):
        return _served(mutant)
    folder = issubclass(mutant, FolderMutant)

    @pytest.fixture
    def config(self: object, tmp_path: Path) -> Mapping[str, object]:
        del self
        return {"root": str(tmp_path)} if folder else {"store": str(tmp_path)}

    @pytest.fixture
    def small(
        self: object, config: Mapping[str, object], tmp_path: Path
    ) -> Mapping[str, object]:
        del self, config
        small = tmp_path / "small"
        place = {"root": str(small)} if folder else {"store": str(small)}
        return place | {"quota_bytes": 1 << 20}

    @pytest.fixture
    def oracle(self: object, tmp_path: Path) -> Oracle | None:
        del self
        if not issubclass(mutant, FolderMutant):
            return None
        return mutant.oracle(FolderShelf(tmp_path))

    return type(
        class_of(mutant),
        (contract_of(mutant),),
        {
            "plugin": f"mutants:{word_of(mutant)}",
            "config": config,
            "small": small,
            "oracle": oracle,
            "stays_s": getattr(mutant, "stays_s", 3.0),
        },
    )


globals().update({class_of(mutant): _suite(mutant) for mutant in MUTANTS})
