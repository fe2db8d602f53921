"""A plugin in memory that misbehaves or declines where a test sets it to."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from kvdock import (
    API_VERSION,
    AttachConfig,
    Backend,
    Batch,
    BatchResult,
    Dock,
    HitPolicy,
    KindSupport,
    Manifest,
    Operation,
    Outcome,
    PoolKind,
    Scope,
    Support,
    hookimpl,
)
from kvdock.plugin import Candidate, accept

if TYPE_CHECKING:
    from kvdock import PoolSpec, Region

HANGS_S = 60.0
"""How long a call hangs, unless a test lets it go on."""


@attrs.define(eq=False)
class Odd:
    """Objects by key.

    Args:
        draft: What it declares about draft models.
        kinds: Kinds of pools that it takes.
        hangs: Set to let every call wait for `go_on`.
        raises: Set to let every call raise.
        lookup_s: How long a lookup takes, unless `go_on` is set.
        calls: How many have reached it, by operation.
    """

    draft: Support = Support.NATIVE
    kinds: frozenset[PoolKind] = frozenset(PoolKind)
    hangs: bool = False
    raises: bool = False
    lookup_s: float = 0.0
    calls: Counter[Operation] = attrs.field(factory=Counter)
    go_on: threading.Event = attrs.field(factory=threading.Event)
    objects: dict[str, bytes] = attrs.field(factory=dict)

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        mine = KindSupport(
            hit_policies=HitPolicy, draft=self.draft, multi_buffer=Support.NATIVE
        )
        return Manifest(
            name="odd",
            api=API_VERSION,
            summary="objects in memory",
            kinds=dict.fromkeys(self.kinds, mine),
            zero_copy=Support.NATIVE,
            integrity=Support.NO,
            sharing=Scope.PROCESS,
            clear_reach=Scope.NAMESPACE,
        )

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Odd:
        del pool, region, config
        return self

    def close(self) -> None:
        """Keep what is stored."""

    def run(self, batch: Batch) -> BatchResult:
        self.calls[batch.operation] += 1
        if self.hangs:
            self.go_on.wait(HANGS_S)
        if self.raises:
            raise RuntimeError("out of order")
        if batch.operation is Operation.EXISTS and self.lookup_s:
            self.go_on.wait(self.lookup_s)
        return BatchResult.of(batch, [self._one(batch, n) for n in range(len(batch))])

    def _one(self, batch: Batch, row: int) -> Outcome:
        key = batch.keys[row]
        if batch.operation is Operation.CLEAR:
            for held_key in [one for one in self.objects if one.startswith(key)]:
                del self.objects[held_key]
            return Outcome.OK
        if batch.operation is Operation.PUT:
            pieces = zip(batch.addresses[row], batch.sizes[row], strict=True)
            self.objects[key] = b"".join(
                ctypes.string_at(int(at), int(n)) for at, n in pieces
            )
            return Outcome.OK
        held = self.objects.get(key)
        if held is None:
            return Outcome.ABSENT
        if batch.operation is Operation.GET:
            start = 0
            for at, n in zip(batch.addresses[row], batch.sizes[row], strict=True):
                ctypes.memmove(int(at), held[start : start + int(n)], int(n))
                start += int(n)
        return Outcome.OK


def dock(plugin: Odd) -> Dock:
    """Load just this plugin."""
    candidate = Candidate(
        name="odd", value="odd:plugin", distribution="tests", version="0"
    )
    return Dock({"odd": Backend(accept(plugin, candidate))})
