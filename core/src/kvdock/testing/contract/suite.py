"""The base of every suite: fixtures, cases by the manifest, the seal."""

from __future__ import annotations

import functools
import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from kvdock.errors import KvdockError
from kvdock.testing.blame import Blame
from kvdock.testing.cases import chooser_of, is_contract_test, is_slow, proved_by
from kvdock.testing.contract.final_tests import (
    OPEN,
    check_collected,
    check_seal,
    contract_of,
)
from kvdock.testing.harness import Harness, Setup
from kvdock.testing.heartbeat import heartbeat
from kvdock.testing.loading import load_backend
from kvdock.testing.scale import Scale

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvdock.plugin.backend import Backend
    from kvdock.testing.oracles import Oracle
    from kvdock.testing.samples import Sample

LOCKED_S = 1.2
"""How long the other threads of an engine may stand still."""


class Suite:
    """Fixtures that an author may override, and machinery that is final."""

    plugin: ClassVar[str]
    """An installed backend's name, or `package.module` of one that is not."""

    tidy: ClassVar[bool] = False
    """Whether to clear what a test stored: for stores that outlive the tests."""

    scale: ClassVar[float] = 1.0
    """How many times slower than a local store the one under test is."""

    large_objects: ClassVar[bool] = True
    """Whether to move objects of 8 MiB and more, where no limit forbids it."""

    stays_s: ClassVar[float] = 3.0
    """How long pages are left alone where nothing is evicted: some expire later."""

    _loaded: ClassVar[Any]
    _blame: ClassVar[Any]

    @pytest.fixture
    def config(self) -> Mapping[str, object]:
        """Return the settings of a store with room for 64 MiB."""
        return {}

    @pytest.fixture
    def small(self) -> Mapping[str, object] | None:
        """Return the settings of a store with room for less than 100 MiB."""
        return None

    @pytest.fixture
    def oracle(self) -> Oracle | None:
        """Return what sees and damages stored bytes behind the plugin's back."""
        return None

    @pytest.fixture
    def harness(self, config: Mapping[str, object]) -> Iterator[Harness]:
        """Attach pools for a test, and release them after it."""
        harness = Harness(
            self.plugin,
            config,
            self.backend(),
            tidy=self.tidy,
            scale=Scale(self.scale),
            large_objects=self.large_objects,
            stays_s=self.stays_s,
        )
        with heartbeat() as beats:
            harness.beats = beats
            try:
                yield harness
            finally:
                harness.close()
        assert beats.most_s < harness.scale.seconds(LOCKED_S), (
            f"no other thread ran for {beats.most_s:.1f} s: a call holds the "
            "interpreter's lock, and an engine stands still meanwhile"
        )

    @pytest.fixture
    def tight(
        self, harness: Harness, small: Mapping[str, object] | None
    ) -> Iterator[Harness]:
        """Attach pools to a store that is soon full, or skip."""
        if small is None:
            pytest.skip("the author gives no `small` settings of a store soon full")
        tight = harness.over(small)
        try:
            yield tight
        finally:
            tight.close()

    @pytest.fixture(autouse=True)
    def case(self) -> object:
        """Stand for the case of a test that every backend runs once."""
        return None

    @pytest.fixture
    def rig(self, harness: Harness, case: Sample) -> Setup:
        """Attach the sample pool that is the case of a test."""
        return harness.rig(case.pool())

    @classmethod
    def backend(cls) -> Backend:
        """Load the plugin under test, once for each class."""
        if not getattr(cls, "plugin", ""):
            raise KvdockError(
                f"{cls.__name__} does not say which backend it is about",
                fix='Give the class a line like: plugin = "mine".',
            )
        if "_loaded" not in cls.__dict__:
            cls._loaded = load_backend(cls.plugin)
            cls._blame = Blame.of(cls._loaded)
        found: Backend = cls._loaded
        return found

    @classmethod
    def blame(cls, error: BaseException | None) -> str:
        """Return the line of the plugin that an error leads to, or ""."""
        cls.backend()
        found: str = cls._blame.where(error)
        return found

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Turn the manifest's cases into runs of a test."""
        _check_once(cast("Any", type(self)))
        check_collected(metafunc.definition)
        test = contract_of(type(self)).get(metafunc.function.__name__)
        choose = chooser_of(test)
        if choose is None:
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
        """Reject a class that changes the contract without a reason."""
        super().__init_subclass__()
        if not sealed:
            check_seal(cls, _SEALED)


@functools.cache
def _check_once(suite: type) -> None:
    """Check the seal of a class that is collected: nothing marks it any more."""
    check_seal(suite, _SEALED)


def proofs(suite: type) -> dict[str, str]:
    """Return the tests that try a capability, with its field of the manifest."""
    return {
        name: field
        for name, test in contract_of(suite).items()
        if (field := proved_by(test))
    }


def slow_tests(suite: type) -> list[str]:
    """Return the tests that a quick check leaves out."""
    return [name for name, test in contract_of(suite).items() if is_slow(test)]


def groups(suite: type) -> dict[str, str]:
    """Return every test of a suite with the title of its group."""
    return {
        name: (inspect.getdoc(room) or "").splitlines()[0].rstrip(".")
        for room in suite.__mro__
        for name, test in vars(room).items()
        if is_contract_test(test)
    }


_KEPT = ("_loaded", "_blame")
"""What a class keeps about its own plugin."""

_SEALED: Mapping[str, object] = MappingProxyType(
    {
        name: thing
        for name, thing in vars(Suite).items()
        if name == "__init_subclass__"
        or not (name.startswith("__") or name in OPEN or name in _KEPT)
    }
)
"""What of a suite is neither Python's nor the author's."""
