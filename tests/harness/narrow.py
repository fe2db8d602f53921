"""Backends that do everything right within narrow limits."""

from __future__ import annotations

import attrs
from reference import Handle, MemoryReference

from kvdock import (
    Batch,
    BatchResult,
    HitPolicy,
    KindSupport,
    Layout,
    Manifest,
    Operation,
    Outcome,
    PoolKind,
    Scope,
    Support,
)


class OneKeyAtATime(MemoryReference):
    """Takes a key per call, forgets nothing and knows two kinds of windows."""

    name = "one_key"

    def manifest(self) -> Manifest:
        mine = KindSupport(
            hit_policies={HitPolicy.TRAILING_PAGES}, layouts={Layout.PAGE_FIRST}
        )
        return attrs.evolve(
            super().manifest(),
            kinds={PoolKind.LOGICAL: mine, PoolKind.MAMBA: mine, PoolKind.SWA: mine},
            max_batch_keys=1,
            clear_reach=Scope.NONE,
        )

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if len(batch) > 1 or batch.operation in (Operation.DELETE, Operation.CLEAR):
            return BatchResult.all(batch, Outcome.REFUSED)
        return super().run(handle, batch)


class SmallStaged(MemoryReference):
    """Takes small objects, from staging memory that it registers."""

    name = "small_staged"

    def manifest(self) -> Manifest:
        return attrs.evolve(
            super().manifest(),
            zero_copy=Support.NO,
            max_object_bytes=64,
        )


class TouchedByALook(MemoryReference):
    """Makes room by what was not asked about for the longest time."""

    name = "touched"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        with handle.lock:
            blob = handle.shelf.read(batch.keys[row])
            if blob is not None and batch.operation is Operation.EXISTS:
                handle.shelf.remove(batch.keys[row])
                handle.shelf.write(batch.keys[row], blob)
        return super().step(handle, batch, row)


def __getattr__(name: str) -> MemoryReference:
    for plugin in (OneKeyAtATime, SmallStaged, TouchedByALook):
        if plugin.name == name:
            return plugin()
    raise AttributeError(name)
