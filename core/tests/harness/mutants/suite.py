"""The contract as a test class for every mutant; run by `__main__` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from reference import FolderShelf

from kvdock.testing.contract import BackendContract, FaultContract
from mutants import MUTANTS
from mutants.mutant import FolderMutant, Mutant, word_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvdock.testing.oracles import Oracle


def class_of(mutant: Mutant) -> str:
    """Return the name of a mutant's test class."""
    return f"Test{mutant.__name__}"


def contract_of(mutant: Mutant) -> type[BackendContract | FaultContract]:
    """Return the contract that has the test by which a mutant is caught."""
    return (
        BackendContract if hasattr(BackendContract, mutant.caught_by) else FaultContract
    )


def _suite(mutant: Mutant) -> type[BackendContract | FaultContract]:
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
        },
    )


globals().update({class_of(mutant): _suite(mutant) for mutant in MUTANTS})
