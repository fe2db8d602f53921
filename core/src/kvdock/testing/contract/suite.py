"""What every suite of the kit has: fixtures, cases by the manifest, the seal."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvdock.errors import KvdockError
from kvdock.testing.cases import chooser_of, is_contract_test
from kvdock.testing.rigs import Harness, load_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdock.dock import Backend
    from kvdock.testing.oracles import Oracle

OPEN = frozenset({"plugin", "config", "small", "oracle", "tidy"})
"""What an author says; everything else of a suite is sealed."""


class SealedError(KvdockError):
    """A test of the contract was overridden without saying why it fails."""


class Suite:
    """Fixtures that an author may replace, and machinery that none may."""

    plugin: ClassVar[str]
    """An installed backend's name, or `package.module` of one that is not."""

    tidy: ClassVar[bool] = False
    """Whether to clear what a test stored: for stores that outlive the tests."""

    _loaded: ClassVar[Any]

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

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turn the manifest's cases into runs of a test."""
        test = inherited(type(self), metafunc.function.__name__)
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

    def __init_subclass__(cls, *, sealed: bool = False) -> None:
        """Refuse a class that changes the contract without saying why.

        Args:
            sealed: The class makes up the contract itself.

        Raises:
            SealedError: If it changes what is not its own.
        """
        super().__init_subclass__()
        for name, override in vars(cls).items() if not sealed else ():
            if inherited(cls, name) is not None:
                if not _excused(override):
                    raise SealedError(
                        f"{cls.__name__} overrides {name}, a test of the contract",
                        fix="Mark it with @pytest.mark.xfail(reason=...).",
                    )
            elif name in _SEALED:
                raise SealedError(
                    f"{cls.__name__} overrides {name}, which belongs to the contract",
                    fix=f"Yours to say are {', '.join(sorted(OPEN))}.",
                )


def inherited(suite: type, name: str) -> object | None:
    """Return the test of the contract that a suite has under a name."""
    for base in suite.__mro__:
        test = vars(base).get(name)
        if is_contract_test(test):
            return test
    return None


def groups(suite: type) -> dict[str, str]:
    """Return every test of a suite with the title of its group."""
    return {
        name: (inspect.getdoc(room) or "").splitlines()[0].rstrip(".")
        for room in suite.__mro__
        for name, test in vars(room).items()
        if is_contract_test(test)
    }


def _excused(override: object) -> bool:
    """Return whether an override says why the test fails."""
    marks = getattr(override, "pytestmark", [])
    return is_contract_test(override) or any(
        mark.name == "xfail" and str(mark.kwargs.get("reason", "")).strip()
        for mark in marks
    )


_SEALED = frozenset(
    name for name in vars(Suite) if not name.startswith("__") and name not in OPEN
) - {"_loaded"} | {"__init_subclass__"}
"""What of a suite is neither Python's nor the author's."""
