"""The contract of a backend, as tests that its author inherits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvdock.errors import KvdockError
from kvdock.testing.cases import chooser_of, is_contract_test
from kvdock.testing.contract.damage import DamageTests
from kvdock.testing.contract.declared import DeclaredTests
from kvdock.testing.contract.keys import KeyTests
from kvdock.testing.contract.lifecycle import LifecycleTests
from kvdock.testing.contract.limits import LimitTests
from kvdock.testing.contract.machine import MachineTests
from kvdock.testing.contract.pages import PageTests
from kvdock.testing.contract.races import RaceTests
from kvdock.testing.contract.ranks import RankTests
from kvdock.testing.contract.writes import WriteTests
from kvdock.testing.rigs import Harness, load_backend

if TYPE_CHECKING:
    from kvdock.dock import Backend
    from kvdock.testing.oracles import Oracle

OPEN = frozenset({"plugin", "config", "small", "oracle", "tidy"})
"""What an author says; everything else of the contract is sealed."""


class SealedError(KvdockError):
    """A test of the contract was overridden without saying why it fails."""


class BackendContract(
    DeclaredTests,
    KeyTests,
    PageTests,
    WriteTests,
    RankTests,
    RaceTests,
    DamageTests,
    LimitTests,
    LifecycleTests,
    MachineTests,
):
    """Inherit, name the plugin, give it settings: the tests come by themselves.

        class TestMine(BackendContract):
            plugin = "mine"

            @pytest.fixture
            def config(self, tmp_path):
                return {"root": str(tmp_path)}

    Each test function gets a store that no other test has used. A test that
    your backend cannot pass yet is overridden by one that says so:

            @pytest.mark.xfail(reason="the server has no delete, issue 12")
            def test_a_deleted_page_is_gone_and_can_be_stored_anew(self): ...

    Any other override, and one without a reason, is refused.
    """

    plugin: ClassVar[str]
    """An installed backend's name, or `package.module` of one that is not."""

    tidy: ClassVar[bool] = False
    """Whether to clear what a test stored: for stores that outlive the tests."""

    @pytest.fixture
    def config(self) -> Mapping[str, object]:
        """Return the settings of a store with room for 64 MiB."""
        return {}

    @pytest.fixture
    def small(self) -> Mapping[str, object] | None:
        """Return the settings of a store that 100 MiB are too much for."""
        return None

    @pytest.fixture
    def oracle(self) -> Oracle | None:
        """Return what sees and damages stored bytes behind the plugin's back."""
        return None

    @pytest.fixture
    def harness(self, config: Mapping[str, object]) -> Iterator[Harness]:
        """Attach pools for a test, and let go of them after it."""
        harness = Harness(self.plugin, config, self.backend(), tidy=self.tidy)
        try:
            yield harness
        finally:
            harness.close()

    @classmethod
    def backend(cls) -> Backend:
        """Load the plugin under test, once for each class."""
        if "_loaded" not in cls.__dict__:
            cls._loaded = load_backend(cls.plugin)
        found: Backend = cls._loaded
        return found

    _loaded: ClassVar[Any]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turn the manifest's cases into runs of a test."""
        test = getattr(BackendContract, metafunc.function.__name__, None)
        choose = chooser_of(test)
        if choose is None or "case" not in metafunc.fixturenames:
            return
        manifest = type(self).backend().manifest
        metafunc.parametrize(
            "case",
            [
                pytest.param(
                    case.value,
                    id=case.id,
                    marks=pytest.mark.skip(reason=case.skip) if case.skip else (),
                )
                for case in choose(manifest)
            ],
        )

    def __init_subclass__(cls) -> None:
        """Refuse a class that changes the contract without saying why.

        Raises:
            SealedError: If it does.
        """
        super().__init_subclass__()
        for name in cls.__dict__:
            original = getattr(BackendContract, name, None)
            if is_contract_test(original):
                if not _excused(cls.__dict__[name]):
                    raise SealedError(
                        f"{cls.__name__} overrides {name}, a test of the contract",
                        fix="Mark it with @pytest.mark.xfail(reason=...).",
                    )
            elif name in _SEALED:
                raise SealedError(
                    f"{cls.__name__} overrides {name}, which belongs to the contract",
                    fix=f"Yours to say are {', '.join(sorted(OPEN))}.",
                )


def groups() -> dict[str, str]:
    """Return every test of the contract with the title of its group."""
    return {
        name: (inspect.getdoc(room) or "").splitlines()[0].rstrip(".")
        for room in BackendContract.__bases__
        for name, test in vars(room).items()
        if is_contract_test(test)
    }


def _excused(override: object) -> bool:
    """Return whether an override says why the test fails."""
    marks = getattr(override, "pytestmark", [])
    return any(
        mark.name == "xfail" and str(mark.kwargs.get("reason", "")).strip()
        for mark in marks
    )


_SEALED = frozenset(
    name
    for name in dir(BackendContract)
    if not name.startswith("__") and name not in OPEN
) - {"_loaded"} | {"__init_subclass__"}
"""Everything of the contract that is neither Python's nor the author's."""
