"""The contract on a backend that `kvdock check` names; run by it alone."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvdock.config import own_settings
from kvdock.errors import KvdockError
from kvdock.testing.contract import (
    BackendContract,
    FaultContract,
    TierContract,
)
from kvdock.testing.contract.suite import Suite
from kvdock.testing.loading import load_backend, oracle_of
from kvdock.testing.report import VARIABLE, resolve_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvdock.testing.oracles import Oracle


def asked() -> Mapping[str, Any]:
    """Return what to check."""
    if VARIABLE not in os.environ:
        raise KvdockError(
            "no backend to check is named", fix="Use `kvdock check NAME`."
        )
    found: Mapping[str, Any] = json.loads(os.environ[VARIABLE])
    return found


class _Given(Suite, sealed=True):
    """The plugin and the settings that were given."""

    plugin = asked()["plugin"] if VARIABLE in os.environ else ""
    scale = asked()["scale"] if VARIABLE in os.environ else 1.0
    large_objects = asked()["large_objects"] if VARIABLE in os.environ else True
    stays_s = asked()["stays_s"] if VARIABLE in os.environ else 3.0
    tidy = True

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        """Return the settings that were given."""
        settings = self.backend().manifest.settings
        return resolve_settings(settings, asked()["settings"], tmp_path)

    @pytest.fixture
    def small(
        self, config: Mapping[str, object], oracle: Oracle | None, tmp_path: Path
    ) -> Any:  # noqa: ANN401 - a mapping or None
        """Return the settings of a small store, given or brought by the oracle."""
        small = asked()["small"]
        if small is None and oracle is not None:
            small = oracle.small(tmp_path / "small")
        if small is None:
            return None
        settings = self.backend().manifest.settings
        return dict(config) | resolve_settings(settings, small, tmp_path / "small")

    @pytest.fixture
    def oracle(self, config: Mapping[str, object]) -> Oracle | None:
        """Return the oracle that the backend's distribution brings, if it does."""
        return oracle_of(self.backend(), config)


class TestContract(_Given, BackendContract):
    """The whole contract."""


class TestTiers(_Given, TierContract):
    """The chain of tiers that was given."""

    tiers = tuple(asked()["tiers"]) if VARIABLE in os.environ else ()

    @pytest.fixture
    def config(self, tmp_path: Path) -> Mapping[str, object]:
        """Return the settings of each tier."""
        return {
            name: resolve_settings(
                load_backend(str(given.get("plugin", name))).manifest.settings,
                given,
                tmp_path / name,
            )
            for name, given in asked()["tiers"].items()
        }

    @pytest.fixture
    def oracle(self, config: Mapping[str, Mapping[str, object]]) -> Oracle | None:
        """Return the oracle of the farthest tier, if its distribution brings one."""
        far = self.tiers[-1]
        backend = load_backend(str(config[far].get("plugin", far)))
        return oracle_of(backend, own_settings(config[far]))


class TestFaults(_Given, FaultContract):
    """The core over it, with faults."""
