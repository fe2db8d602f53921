"""A plugin of another contract is rejected with what to upgrade."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import pytest

from kvdock.plugin import loading
from kvdock.plugin.discovery import Candidate, LoadStage, PluginProblem
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest
from kvdock.pools.enums import PoolKind

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "versioned"


CANDIDATE = Candidate(
    name=NAME, value="versioned_plugin", distribution="kvdock-versioned", version="3"
)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType("versioned_plugin")
    sys.modules["versioned_plugin"] = made
    yield made
    del sys.modules["versioned_plugin"]


def problem_with(module: ModuleType, manifest: Any) -> PluginProblem:
    @hookimpl
    def kvdock_manifest() -> Any:
        return manifest() if callable(manifest) else manifest

    module.kvdock_manifest = kvdock_manifest  # type: ignore[attr-defined] # a hook
    plugins, (problem,) = loading.load_all([CANDIDATE])
    assert not plugins
    return problem


def numbered(api: int) -> Manifest:
    return Manifest(
        name=NAME, api=api, summary="-", kinds={PoolKind.MHA: KindSupport()}
    )


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core of some years later."""
    monkeypatch.setattr("kvdock.plugin.validation.OLDEST_API_VERSION", 3)
    monkeypatch.setattr("kvdock.plugin.validation.API_VERSION", 5)


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize("api", [3, 4, 5])
def test_every_number_that_is_spoken_runs(module: ModuleType, api: int) -> None:
    problem = problem_with(module, numbered(api))
    # All that is wrong with it is that it has no other hook.
    assert problem.stage is LoadStage.VALIDATE


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize(
    ("api", "fix"),
    [
        (2, "Upgrade kvdock-versioned, or install an older kvdock."),
        (6, "Upgrade kvdock, or install an older kvdock-versioned."),
    ],
)
def test_too_old_and_too_new_each_get_their_advice(
    module: ModuleType, api: int, fix: str
) -> None:
    problem = problem_with(module, numbered(api))
    assert problem.stage is LoadStage.MANIFEST
    assert problem.cause == f"it is written for API {api}, this kvdock speaks 3 to 5"
    assert problem.fix == fix


@pytest.mark.parametrize("api", ["1", 1.0, True, None])
def test_what_is_not_a_number_is_named(module: ModuleType, api: Any) -> None:
    problem = problem_with(module, numbered(api))
    assert problem.stage is LoadStage.MANIFEST
    assert problem.cause == f"its manifest says api={api!r}, which is not a number"
    assert problem.fix.endswith(f"api={API_VERSION}.")


def test_the_number_is_read_before_anything_else_of_a_manifest(
    module: ModuleType,
) -> None:
    """A manifest of the future need not be a class that this kvdock has."""

    @attrs.frozen
    class Manifest2:
        api: int = API_VERSION + 1

    problem = problem_with(module, Manifest2())
    assert problem.fix == "Upgrade kvdock, or install an older kvdock-versioned."


def test_an_old_plugin_still_runs_when_optional_hooks_and_arguments_are_added(
    module: ModuleType,
) -> None:
    """It names the arguments that it knows, and leaves out what it does not."""

    hooks: dict[str, Any] = {
        "kvdock_manifest": lambda: numbered(API_VERSION),
        "kvdock_register_pool": lambda pool: pool,
        "kvdock_key_suffix": lambda pool: (f".{pool.name}",),
    }
    for name, hook in hooks.items():
        setattr(module, name, hookimpl(hook))
    plugins, problems = loading.load_all([CANDIDATE])
    assert not problems
    assert plugins[NAME].manifest.eviction.value == "?"
