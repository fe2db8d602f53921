"""A trial's backend is chosen by what manifests declare."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvdock import Dock, KindSupport, KvdockError, Manifest, PoolKind, Scope
from model_demo.backends import choose_lasting, completed


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
            manifest=Manifest(
                name=name,
                api=2,
                summary="a test",
                kinds={PoolKind.MHA: KindSupport()},
                durability=durability,
                settings=settings,
            )
        )
        for name, (durability, settings) in manifests.items()
    }
    return Dock(backends)


def test_the_first_backend_that_outlives_a_process_in_a_directory_is_chosen() -> None:
    dock = dock_of(
        a=(Scope.NONE, WithPath),
        b=(Scope.PROCESS, WithoutPath),
        c=(Scope.HOST, WithPath),
        d=(Scope.HOST, WithPath),
    )
    assert choose_lasting(dock)[0] == "c"
    assert choose_lasting(dock, "b") == ("b", "asked for")


def test_a_backend_that_forgets_with_its_process_is_refused() -> None:
    dock = dock_of(a=(Scope.NONE, WithPath), c=(Scope.HOST, WithPath))
    with pytest.raises(KvdockError, match=r"no longer than the process.*\['c'\]"):
        choose_lasting(dock, "a")


def test_without_any_fitting_backend_the_error_says_what_to_install() -> None:
    with pytest.raises(KvdockError, match="pip install"):
        choose_lasting(dock_of())


def test_settings_that_are_given_go_before_the_directory(tmp_path: Path) -> None:
    dock = dock_of(c=(Scope.HOST, WithPath), b=(Scope.HOST, WithoutPath))
    made = completed(dock, "cb", tmp_path, {"c": {"limit": 3}, "z": {"x": 1}})
    assert made == {"c": {"folder": str(tmp_path / "c"), "limit": 3}, "b": {}}
    made = completed(dock, "cb", tmp_path, {"c": {"folder": "/x"}})
    assert made["c"] == {"folder": "/x"}
