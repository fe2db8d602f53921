"""Weights that are replaced at run time: their pages are found by no request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import controllers
import pytest
import test_families as families
import zoo
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)

from kvdock.errors import KvdockError
from kvdock_sglang import engine_api, weight_updates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvdock_sglang import KvdockStorage


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for state in ("_attached", "_replaced"):
        monkeypatch.setattr(weight_updates, state, set())
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


def update() -> None:
    """Let the engine's own manager replace the weights of no runner."""
    manager: Any = object.__new__(SchedulerWeightUpdaterManager)
    manager.metrics_collector, manager.draft_worker = None, None
    manager.tp_worker = SimpleNamespace(weight_update_runners=list)
    manager.scheduler = SimpleNamespace(record_weight_version_change=lambda **_: None)
    asked: Any = SimpleNamespace(weight_version=None)
    assert manager.update_weights_from_disk(asked).success


def moved(storage: KvdockStorage, pool: Any) -> tuple[bool, int, bool]:
    """Return what a write, a lookup and a read of one page say."""
    keys, slots = families.hashes(1), zoo.slots(pool, [0])
    found = storage.batch_exists(keys)
    (read,) = storage.batch_get_v1(keys, slots)
    (written,) = storage.batch_set_v1(keys, slots)
    return written, found, read


@pytest.mark.parametrize("path", weight_updates.UPDATES)
def test_every_way_to_replace_weights_is_noticed(path: str) -> None:
    assert engine_api.in_place(path)


@pytest.mark.parametrize("revision", ["", "r1"])
def test_storage_misses_from_an_update_until_it_has_another_revision(
    revision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = zoo.mha_host()
    mine = families.config(tmp_path, extra={"revision": revision})
    with families.attached(mine, {"kv": pool}) as storage:
        assert moved(storage, pool) == (True, 0, False)
        assert moved(storage, pool) == (True, 1, True)
        update()
        assert moved(storage, pool) == (False, 0, False)
    assert "the weights were replaced at run time" in caplog.text
    for stale in ("", revision):
        again = families.config(tmp_path, extra={"revision": stale})
        with (
            pytest.raises(KvdockError, match="were replaced at run time"),
            families.attached(again, {"kv": pool}),
        ):
            pass
    other = families.config(tmp_path, extra={"revision": "r2"})
    with families.attached(other, {"kv": pool}) as storage:
        assert moved(storage, pool) == (True, 0, False)
        assert moved(storage, pool) == (True, 1, True)
        update()
        assert moved(storage, pool) == (False, 0, False)
