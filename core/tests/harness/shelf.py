"""A backend in memory with switches for everything that can go wrong.

`Shelf` is a plugin of its own; `Engine` attaches pools to it and knows what
each page must hold.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from plugins_of_objects import loaded
from waiting import until

from kvdock.arrays import ByteArray
from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import CoreSettings, Integrity
from kvdock.config.schema import structure
from kvdock.dock import Dock
from kvdock.geometry.region import Region
from kvdock.keys import key_suffixes
from kvdock.namespace import Namespace
from kvdock.plugin.backend import Backend
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Scope, Support
from kvdock.plugin.wrapper import wrapped_plugin
from kvdock.pools.enums import HitPolicy, Layout, Per, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.routing.verdicts import RouteRequirements
from kvdock.transfer.attachment import Attachment
from kvdock.wrappers.faults import FaultInjector  # noqa: TC001 - attrs reads it

Trouble = Callable[[Batch], BatchResult | None]
"""Called before a batch; answers it in the shelf's place, or lets it pass."""

PAGES = 24


def memory_at(address: int, nbytes: int) -> memoryview:
    raw: Any = (ctypes.c_char * nbytes).from_address(address)
    return memoryview(raw).cast("B")


@attrs.frozen
class ShelfPool:
    """The store of one pool: methods of its shelf, that are told which pool it is."""

    shelf: Shelf
    name: str

    def __getattr__(self, member: str) -> Any:
        return partial(getattr(self.shelf, member), self.name)


@attrs.define(eq=False)
class Shelf:
    """Objects by key, as bytes. Subclasses may have optional members of a store."""

    name: str = "shelf"
    zero_copy: Support = Support.NATIVE
    multi_buffer: Support = Support.NATIVE
    integrity: Support = Support.NO
    gated: Support = Support.UNDECLARED
    sharing: Scope = Scope.NONE
    max_batch_keys: int = 0
    retention: Support = Support.UNDECLARED
    objects: dict[str, bytes] = attrs.field(factory=dict)
    regions: dict[str, Region] = attrs.field(factory=dict)
    calls: list[Batch] = attrs.field(factory=list)
    released: list[object] = attrs.field(factory=list)
    trouble: Trouble | None = None
    strict: bool = False
    inside: int = 0
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        kind = KindSupport(
            hit_policies=HitPolicy,
            split_heads=Support.NATIVE,
            draft=Support.NATIVE,
            multi_buffer=self.multi_buffer,
        )
        optional = ("touch", "removed", "capacity")
        declared: Any = {one: Support.NATIVE for one in optional if hasattr(self, one)}
        return Manifest(
            **declared,
            name=self.name,
            api=API_VERSION,
            summary="objects in memory",
            kinds=dict.fromkeys(PoolKind, kind),
            zero_copy=self.zero_copy,
            integrity=self.integrity,
            gated_get=self.gated,
            gated_put=self.gated,
            durability=Scope.PROCESS,
            sharing=self.sharing,
            max_batch_keys=self.max_batch_keys,
            retention=self.retention,
        )

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ShelfPool:
        del config
        self.regions[pool.name] = region
        return ShelfPool(self, pool.name)

    @hookimpl
    def kvdock_key_suffix(self, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
        return key_suffixes(pool, shard)

    def run(self, pool: str, batch: Batch) -> BatchResult:
        with self.lock:
            self.inside += 1
            self.calls.append(batch)
        try:
            answer = self.trouble(batch) if self.trouble else None
            return self.serve(pool, batch) if answer is None else answer
        finally:
            with self.lock:
                self.inside -= 1

    def close(self, pool: str) -> None:
        self.released.append(pool)

    def serve(self, pool: str, batch: Batch) -> BatchResult:
        self.check_memory(pool, batch)
        outcomes = np.zeros(len(batch), np.uint8)
        for row, key in enumerate(batch.keys):
            outcomes[row] = self.serve_one(batch, row, key)
        return BatchResult.of(batch, outcomes)

    def serve_one(self, batch: Batch, row: int, key: str) -> Outcome:
        if batch.operation is Operation.CLEAR:
            gone = [one for one in self.objects if one.startswith(key)]
            for one in gone:
                self.objects.pop(one, None)
            return Outcome.OK
        if batch.operation is Operation.DELETE:
            self.objects.pop(key, None)
            return Outcome.OK
        if batch.operation is Operation.EXISTS:
            return Outcome.OK if key in self.objects else Outcome.ABSENT
        if batch.gate is None:
            return self.copy(batch, row, key)
        if not batch.gate.enter():
            return Outcome.TIMEOUT
        try:
            return self.copy(batch, row, key)
        finally:
            batch.gate.leave()

    def copy(self, batch: Batch, row: int, key: str) -> Outcome:
        pieces = [
            memory_at(int(at), int(size))
            for at, size in zip(batch.addresses[row], batch.sizes[row], strict=True)
            if size
        ]
        if batch.operation is Operation.PUT:
            self.objects.setdefault(key, b"".join(pieces))
            return Outcome.OK
        stored = self.objects.get(key)
        if stored is None:
            return Outcome.ABSENT
        if self.strict and len(stored) != sum(map(len, pieces)):
            return Outcome.CORRUPT
        # Like a careless client: what is too long is cut, too short is left.
        at = 0
        for piece in pieces:
            part = stored[at : at + len(piece)]
            piece[: len(part)] = part
            at += len(piece)
        return Outcome.OK

    def check_memory(self, pool: str, batch: Batch) -> None:
        """Refuse addresses that no registered block has, as RDMA would."""
        blocks = self.regions[pool].blocks
        for at, size in zip(
            batch.addresses.ravel().tolist(), batch.sizes.ravel().tolist(), strict=True
        ):
            assert not size or any(
                block.address <= at and at + size <= block.address + block.nbytes
                for block in blocks
            ), "memory that was never registered"
        if not self.multi_buffer:
            pieces = (batch.sizes > 0).sum(axis=1) if batch.sizes.size else np.zeros(1)
            assert pieces.max() <= 1, "one piece at a time was declared"

    def backend(self) -> Backend:
        """Load it as discovery would, without an entry point."""
        return loaded(self, self.name)


def hashes(count: int, first: int = 0) -> list[str]:
    return [f"{page:064x}" for page in range(first, first + count)]


def attention(**more: Any) -> PoolSpec:
    parts = [Part(name, "f16", (2, 8), shard_axis=0) for name in ("k", "v")]
    given: dict[str, Any] = {
        "name": "kv",
        "kind": PoolKind.MHA,
        "parts": parts,
        "layers": range(2),
        "page_tokens": 4,
        "anchor": True,
        **more,
    }
    return PoolSpec(**given)


def draft() -> PoolSpec:
    return attention(
        name="draft", anchor=False, draft=True, required=False, indices_from="kv",
        layers=range(1),
    )  # fmt: skip


def states() -> PoolSpec:
    return PoolSpec(
        name="mamba",
        kind=PoolKind.MAMBA,
        parts=[
            Part("temporal", "f32", (4, 4), Per.PAGE),
            Part("conv_0", "f16", (6,), Per.PAGE),
        ],
        layers=[1, 3],
        page_tokens=4,
        hit_policy=HitPolicy.TRAILING_PAGES,
        window_pages=1,
    )


def indexer() -> PoolSpec:
    return PoolSpec(
        name="indexer",
        kind=PoolKind.INDEXER,
        parts=[Part("indexer", "u8", (33,))],
        layers=range(3),
        page_tokens=4,
        indices_from="kv",
        layout=Layout.LAYER_FIRST,
    )


def held_by(gate: threading.Event, *operations: str) -> Callable[[Batch], None]:
    """A trouble: calls wait for a gate, those of some operations or all."""

    def wait(batch: Batch) -> None:
        if not operations or batch.operation in operations:
            assert gate.wait(60)

    return wait


E = TypeVar("E")


class Heard(Generic[E]):
    """An observer that keeps the events of one kind."""

    def __init__(self, kind: type[E], *, pages: bool = False) -> None:
        self.kind, self.observes_pages = kind, pages
        self.events: list[E] = []

    @hookimpl
    def kvdock_observe(self, event: object) -> None:
        if isinstance(event, self.kind):
            self.events.append(event)


@attrs.define(eq=False)
class Engine:
    """Pools of an engine on one shelf (or several), and what pages must hold."""

    shelves: Sequence[Shelf] = attrs.field(factory=lambda: (Shelf(),))
    pools: Sequence[PoolSpec] = attrs.field(factory=lambda: (attention(),))
    core: CoreSettings = attrs.field(factory=CoreSettings)
    overrides: Mapping[str, str] = attrs.field(factory=dict)
    tiers: Sequence[str | Mapping[str, object]] = ()
    observers: Sequence[object] = ()
    faults: FaultInjector | None = None
    wrappers: Sequence[tuple[str, Any]] = ()
    shard: Shard = attrs.field(factory=Shard)
    namespace: Namespace = attrs.field(factory=lambda: Namespace(model="m"))
    memory: dict[str, ByteArray] = attrs.field(init=False)
    attachment: Attachment = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        backends = {shelf.name: shelf.backend() for shelf in self.shelves}
        around = list(self.wrappers)
        if self.faults is not None:
            around.append(("faults", self.faults))
        if around:
            backends = {
                name: Backend(wrapped_plugin(one.plugin, around))
                for name, one in backends.items()
            }
        for backend in backends.values():
            for number, observer in enumerate(self.observers):
                backend.add_observer(f"observer-{number}", observer)
        dock = Dock(backends)
        plan = dock.plan(
            self.pools,
            self.shard,
            overrides=self.overrides,
            tiers=self.tiers,
            needs=RouteRequirements(
                integrity=self.core.integrity, staging=self.core.calls.staging
            ),
        )
        self.memory = {
            pool.name: np.zeros((PAGES, pool.page_bytes(self.shard)), np.uint8)
            for pool in self.pools
        }
        regions = {
            pool.name: Region.of(pool, self.shard, [self.memory[pool.name]], PAGES)
            if pool.physical
            else Region.of(pool, self.shard, [], PAGES)
            for pool in self.pools
        }
        self.attachment = Attachment.open(
            dock, plan, self.namespace, regions, core=self.core
        )

    @property
    def shelf(self) -> Shelf:
        return self.shelves[0]

    def content(self, pool: str, page_hash: str) -> ByteArray:
        """What a page of a pool holds, by its hash alone."""
        spec = next(one for one in self.pools if one.name == pool)
        seed = [int(page_hash, 16), *pool.encode()]
        generator = np.random.default_rng(seed)
        size = spec.page_bytes(self.shard)
        return generator.integers(0, 256, size, np.uint8)

    def rows(self, pool: str, pages: Sequence[int]) -> ByteArray:
        """Pages of a pool as the engine sees them, in any layout."""
        attached = self.attachment._backends.pools[pool]
        rows = np.zeros((len(pages), attached.page_bytes), np.uint8)
        attached.region.gather(pages, rows)
        return rows

    def fill(self, names: Sequence[str], pages: Sequence[int]) -> None:
        """Compute the pages of a prefix, as a prefill would."""
        for pool in self.pools:
            if pool.physical:
                attached = self.attachment._backends.pools[pool.name]
                rows = np.stack([self.content(pool.name, name) for name in names])
                attached.region.scatter(pages, rows)

    def store(self, count: int, *, blank: bool = False) -> list[str]:
        """Compute and store the first pages; return their hashes."""
        names = hashes(count)
        self.fill(names, range(count))
        stored = self.attachment.put(names, self.where(range(count)))
        assert stored.pages == count, stored.outcomes
        if blank:
            self.blank()
        return names

    def where(self, pages: Sequence[int]) -> dict[str, Sequence[int]]:
        return {pool.name: pages for pool in self.pools if pool.physical}

    def holds(self, pool: str, page_hash: str, page: int) -> bool:
        """Whether a page is what was computed for this hash."""
        mine = self.rows(pool, [page])[0]
        return bool(np.array_equal(mine, self.content(pool, page_hash)))

    def blank(self) -> None:
        for memory in self.memory.values():
            memory[:] = 0xEE


HASTE_S = 0.3
"""Deadline of what is meant to hang."""

ENDED_S = 10.0
"""Bound of a call that ends by such a deadline: half of what `patient` gives all
others, since a busy machine wakes a thread late."""


def patient(**more: Any) -> CoreSettings:
    """Settings with which nothing is late by accident, on a busy machine too."""
    calls = ("exists", "get", "put", "delete", "clear", "release", "close")
    given: dict[str, Any] = {
        "deadlines": dict.fromkeys(calls, "20 s"),
        "breaker": {"backoff": "40 ms", "max_backoff": "80 ms", "probe_timeout": "5 s"},
    }
    return structure(CoreSettings, given | more, where="tests")


def hasty(*calls: str, **more: Any) -> CoreSettings:
    """Settings with short deadlines for the calls that are meant to hang."""
    core = patient(**more)
    deadlines = attrs.evolve(core.deadlines, **dict.fromkeys(calls, HASTE_S))
    return attrs.evolve(core, deadlines=deadlines)


__all__ = [
    "ENDED_S",
    "HASTE_S",
    "PAGES",
    "ByteArray",
    "Engine",
    "Heard",
    "Integrity",
    "Shelf",
    "Trouble",
    "attention",
    "draft",
    "hashes",
    "hasty",
    "held_by",
    "indexer",
    "memory_at",
    "patient",
    "states",
    "until",
]
