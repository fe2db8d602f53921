"""Plugins in the form of objects, loaded as discovery would, without an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.keys import key_suffixes
from kvdock.plugin.backend import Backend
from kvdock.plugin.discovery import Candidate
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from kvdock.plugin.loading import accept
from kvdock.plugin.manifest import API_VERSION, KindSupport, Manifest, Support
from kvdock.pools.enums import PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.pools.shard import Shard

POOL = PoolSpec(
    name="kv", kind=PoolKind.MHA, parts=[Part("k", "f16", (2, 8), shard_axis=0)],
    layers=range(2), page_tokens=4, anchor=True,
)  # fmt: skip


@attrs.define(eq=False)
class Plain:
    """The least that a store is."""

    calls: list[object] = attrs.field(factory=list)

    def run(self, batch: Batch) -> BatchResult:
        self.calls.append(batch)
        return BatchResult.all(batch, Outcome.OK)

    def close(self) -> None:
        self.calls.append("close")


class Full(Plain):
    """A store with everything that is optional."""

    def touch(self, keys: Sequence[str]) -> None:
        self.calls.append(("touch", tuple(keys)))

    def removed(self, limit: int) -> Sequence[str]:
        return [f"gone-{limit}"]

    def capacity(self) -> Capacity:
        return Capacity(3, 7)

    @property
    def peers(self) -> Peers:
        return Peers(self.calls)


@attrs.frozen
class Peers:
    """Memory that peers write to."""

    calls: list[object]

    def endpoint(self) -> bytes:
        return b"here"

    def connect(self, endpoint: bytes, deadline_s: float) -> object:
        return endpoint, deadline_s

    def disconnect(self, peer: object) -> bool:
        return peer == "peer"

    def withdraw(self) -> bool:
        return True

    def send(self, batch: Batch) -> BatchResult:
        self.calls.append("send")
        return BatchResult.all(batch, Outcome.REFUSED)


ALL = dict.fromkeys(("touch", "removed", "capacity", "peers"), Support.NATIVE)


class Objects:
    """A plugin of two hooks."""

    def __init__(self, store: object, **declared: Any) -> None:
        self.store, self.declared = store, declared

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        kinds = {PoolKind.MHA: KindSupport()}
        return Manifest(
            name="obj", api=API_VERSION, summary="s", kinds=kinds, **self.declared
        )

    @hookimpl
    def kvdock_register_pool(self) -> object:
        return self.store


def attach(plugin: object) -> tuple[Backend, Any]:
    backend = loaded(plugin, "obj")
    # The region is the store's affair, and these want none.
    region: Any = None
    return backend, backend.register_pool(POOL, region, AttachConfig())


def lookup() -> Batch:
    return Batch(Operation.EXISTS, ["a", "b"])


class Functions(Objects):
    """A plugin that does its batches in its own hook."""

    @hookimpl
    def kvdock_key_suffix(self, pool: PoolSpec, shard: Shard) -> Sequence[str]:
        return key_suffixes(pool, shard)

    @hookimpl
    def kvdock_batch_io(self, store: object, batch: Batch) -> BatchResult:
        assert store is self.store
        return BatchResult.all(batch, Outcome.ABSENT)


def loaded(plugin: object, name: str) -> Backend:
    """Load a plugin as discovery would; return its backend."""
    candidate = Candidate(name=name, value="tests", distribution="tests", version="0")
    # What it declares of integrity is to count.
    return Backend(attrs.evolve(accept(plugin, candidate), believed=True))
