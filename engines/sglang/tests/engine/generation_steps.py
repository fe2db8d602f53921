"""A scheduler's step, as far as generations look at it, over a real storage."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager,
)

from kvdock_sglang import engine_patches, weight_updates

if TYPE_CHECKING:
    import pytest

    from kvdock_sglang import KvdockStorage


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know nothing of its weights, as one that has just started."""
    fresh = weight_updates.Weights()
    for field in attrs.fields(weight_updates.Weights):
        value = getattr(fresh, field.name)
        monkeypatch.setattr(weight_updates.WEIGHTS, field.name, value)


def request(kind: str, **fields: object) -> object:
    """Return a request to the scheduler that has these fields alone."""
    return type(kind, (), fields)()


class Step:
    """A scheduler that takes requests about weights, and whose cache may be empty."""

    def __init__(self, storage: KvdockStorage, group: object) -> None:
        self.storage = storage
        self.updater = SimpleNamespace(
            _session=None,
            offload_tags=set(),
            tp_cpu_group=group,
            scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None),
        )
        self.children: dict[str, object] = {}
        self.slots: dict[str, object] = {}
        self.idle, self.host_pages = True, 0
        cache = SimpleNamespace(
            evictable_size=lambda: len(self.children),
            protected_size=lambda: 0,
            session=SimpleNamespace(slots=self.slots),
            cache_controller=SimpleNamespace(
                storage_backend=storage,
                mem_pool_host=SimpleNamespace(
                    logical_size=9, available_size=lambda: 9 - self.host_pages
                ),
            ),
        )
        self.scheduler: Any = SimpleNamespace(
            weight_updater=self.updater,
            tree_cache=cache,
            is_fully_idle=lambda **_: self.idle,
        )

    def run(self, kind: str = "", *, done: bool = True, **fields: object) -> float:
        """Take a request, or none, and end the step; return how long it took."""
        began_s = time.monotonic()

        def handle(*_: object) -> None:
            if not kind:
                return
            weight_updates.note_update(request(kind, **fields))
            loads = weight_updates.UPDATES.get(kind) is weight_updates.UpdateKind.LOADS
            if done and loads:
                # By SGLang's own function, with the patch around it.
                record = (
                    SchedulerWeightUpdaterManager.record_weight_version_after_update
                )
                record(self.updater, fields.get("weight_version"))

        engine_patches.open_generation(handle, self.scheduler, [])
        return time.monotonic() - began_s
