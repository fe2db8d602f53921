"""A trial's backend is chosen by what manifests declare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvdock import Dock, KvdockError, Scope
from kvdock_transformers.backends import choose, path_setting


@attrs.frozen
class WithPath:
    limit: int = 0
    folder: Path | None = None


@attrs.frozen
class WithoutPath:
    url: str = ""


def dock_of(**manifests: tuple[Scope, type | None]) -> Dock:
    backends: dict[str, Any] = {
        name: SimpleNamespace(
            manifest=SimpleNamespace(durability=durability, settings=settings)
        )
        for name, (durability, settings) in manifests.items()
    }
    return Dock(backends)


def test_the_setting_that_is_a_path_is_found_by_its_type() -> None:
    assert path_setting(WithPath) == "folder"
    assert path_setting(WithoutPath) is None
    assert path_setting(None) is None


def test_the_first_backend_that_outlives_a_process_in_a_directory_is_chosen() -> None:
    dock = dock_of(
        a=(Scope.PROCESS, WithPath),
        b=(Scope.CLUSTER, WithoutPath),
        c=(Scope.HOST, WithPath),
        d=(Scope.HOST, WithPath),
    )
    assert choose(dock) == "c"
    assert choose(dock, "b") == "b"


def test_a_backend_that_forgets_with_its_process_is_refused() -> None:
    dock = dock_of(a=(Scope.PROCESS, WithPath), c=(Scope.HOST, WithPath))
    with pytest.raises(KvdockError, match=r"no longer than a process.*\['c'\]"):
        choose(dock, "a")


def test_without_any_fitting_backend_the_error_says_what_to_install() -> None:
    with pytest.raises(KvdockError, match="pip install"):
        choose(dock_of())
