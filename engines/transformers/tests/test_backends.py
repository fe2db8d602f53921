"""A trial's backend is chosen by what manifests declare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvdock import Dock, KvdockError, Scope
from kvdock.errors import SettingsError
from kvdock.plugin import Candidate
from kvdock_transformers import backends
from kvdock_transformers.backends import (
    choose,
    configured,
    path_setting,
    served,
    settings_for,
)


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
        a=(Scope.NONE, WithPath),
        b=(Scope.PROCESS, WithoutPath),
        c=(Scope.HOST, WithPath),
        d=(Scope.HOST, WithPath),
    )
    assert choose(dock) == "c"
    assert choose(dock, "b") == "b"


def test_a_backend_that_forgets_with_its_process_is_refused() -> None:
    dock = dock_of(a=(Scope.NONE, WithPath), c=(Scope.HOST, WithPath))
    with pytest.raises(KvdockError, match=r"no longer than the process.*\['c'\]"):
        choose(dock, "a")


def test_without_any_fitting_backend_the_error_says_what_to_install() -> None:
    with pytest.raises(KvdockError, match="pip install"):
        choose(dock_of())


def test_a_server_that_is_announced_runs_as_long_as_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidate = Candidate(
        name="own",
        value=f"{__name__}:bring_server",
        distribution="?",
        version="?",
        group=backends.SERVERS,
    )
    monkeypatch.setattr(backends, "list_entry_points", lambda _group: (candidate,))
    with served("own", {"a": 1}) as (settings, notice):
        assert (settings, notice) == ({"a": 1, "at": "here"}, "started one")
        assert RUNNING == [1]
    assert RUNNING == []
    with served("other", {"a": 1}) as (settings, notice):
        assert (settings, notice) == ({"a": 1}, "")


RUNNING: list[int] = []


@contextmanager
def bring_server(given: dict[str, object]) -> Iterator[tuple[dict[str, object], str]]:
    RUNNING.append(1)
    yield {**given, "at": "here"}, "started one"
    RUNNING.clear()


def test_what_is_not_given_is_taken_from_file_and_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the directory: pages of a demo belong to no engine's store."""
    dock = dock_of(a=(Scope.HOST, WithPath))
    file = tmp_path / "kvdock.toml"
    file.write_text('[backends.a]\nfolder = "/var/lib/kv"\nlimit = 3\n')
    monkeypatch.setenv("KVDOCK_CONFIG", str(file))
    assert configured(dock, "a", {}) == {"limit": 3}
    monkeypatch.setenv("KVDOCK_BACKENDS__A__LIMIT", "4")
    assert configured(dock, "a", {}) == {"limit": "4"}
    assert configured(dock, "a", {"limit": "5"}) == {"limit": "5"}
    with pytest.raises(SettingsError, match=r"--set folder .* Say .* with --dir"):
        configured(dock, "a", {"folder": "/var/lib/kv"})


def test_settings_that_are_given_go_before_the_directory(tmp_path: Path) -> None:
    dock = dock_of(c=(Scope.HOST, WithPath), b=(Scope.HOST, WithoutPath))
    plan: Any = SimpleNamespace(
        accepted=[SimpleNamespace(backend="c"), SimpleNamespace(backend="b")]
    )
    made = settings_for(dock, plan, tmp_path, {"c": {"limit": 3}, "z": {"x": 1}})
    assert made == {"c": {"folder": str(tmp_path / "c"), "limit": 3}, "b": {}}
    made = settings_for(dock, plan, tmp_path, {"c": {"folder": "/x"}})
    assert made["c"] == {"folder": "/x"}
