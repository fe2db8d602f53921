"""A shelf that keeps times itself, as a backend of native retention does."""

from __future__ import annotations

import time

import attrs
import numpy as np
from shelf import Shelf

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.plugin.manifest import Support


@attrs.define(eq=False)
class TimedShelf(Shelf):
    """Objects with a time to expire; promises are all kept."""

    integrity: Support = Support.NATIVE
    retention: Support = Support.NATIVE
    ends: dict[str, int] = attrs.field(factory=dict)
    promised: dict[str, int] = attrs.field(factory=dict)

    def serve(self, handle: str, batch: Batch) -> BatchResult:
        result = super().serve(handle, batch)
        ends = np.array([self.ends.get(key, 0) for key in batch.keys], np.int64)
        asks = batch.operation is Operation.RETAIN and batch.expire_at is None
        asks = asks and not batch.keep_until
        tells = asks or batch.operation is Operation.GET
        kept = [self.promised.get(key, 0) > time.time() for key in batch.keys]
        return attrs.evolve(
            result,
            kept=np.array(kept) if asks or batch.keep_until else None,
            expire_at=ends if tells and ends.any() else None,
        )

    def serve_one(self, batch: Batch, row: int, key: str) -> Outcome:
        if self.over(key):
            del self.ends[key]
            self.objects.pop(key, None)
        if batch.operation is Operation.RETAIN and key not in self.objects:
            return Outcome.ABSENT
        if batch.expire_at is not None and batch.expire_at[row]:
            self.ends[key] = int(batch.expire_at[row])
        if batch.keep_until:
            self.promised[key] = batch.keep_until
        if batch.operation is Operation.RETAIN:
            return Outcome.OK
        if batch.operation is Operation.DELETE:
            self.ends.pop(key, None)
            self.promised.pop(key, None)
        return super().serve_one(batch, row, key)

    def over(self, key: str) -> bool:
        return 0 < self.ends.get(key, 0) <= time.time()
