"""The hooks of the HiCache backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capability,
    Finding,
    KindSupport,
    Manifest,
    Shard,
    Support,
    Verdict,
    hookimpl,
)
from kvdock.errors import AttachError
from kvdock_hicache.settings import HiCacheSettings

if TYPE_CHECKING:
    from kvdock import Batch, BatchResult, PoolSpec, Region
    from kvdock_hicache.store import HiCacheStore


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare what holds for every class; the settings choose one later."""
    return Manifest(
        name="hicache",
        api=API_VERSION,
        summary="pages through a storage class of SGLang's HiCache, with copies",
        # Heads go apart to be found by other ranks, which no class promises.
        kinds={
            kind: attrs.evolve(one, split_heads=Support.UNDECLARED)
            for kind, one in KindSupport.of_every_kind().items()
        },
        zero_copy=Support.EMULATED,
        memory_registration=Support.NO,
        host_allocator=Support.NO,
        # A class sees copies alone, which are made and taken inside of the gate.
        gated_get=Support.NATIVE,
        gated_put=Support.NATIVE,
        peers=Support.NO,
        integrity=Support.NO,
        fork_safe=Support.NO,
        settings=HiCacheSettings,
    )


@hookimpl
def kvdock_check_capability(
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    settings: Any,  # noqa: ANN401 - HiCacheSettings, or None without settings
) -> Verdict | None:
    """Refuse every pool where the class, or its methods, cannot be had."""
    del pool, shard
    if capability is not Capability.STORE or settings is None:
        return None
    (found,) = _look(settings)
    return Verdict(Support.NATIVE if found.ok else Support.NO, found.what)


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Import the class and look at its methods; build nothing."""
    return _look(config.settings)


def _look(settings: HiCacheSettings) -> list[Finding]:
    from kvdock_hicache.storage import FoundClass  # noqa: PLC0415 - torch

    try:
        found = FoundClass.of(settings)
    except AttachError as error:
        return [Finding(ok=False, what=error.what, hint=error.fix)]
    said = f"{settings.storage_class} is called in the form {found.form}"
    return [Finding(ok=True, what=said)]


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> HiCacheStore:
    """Build the class's object, or share it with the other pools."""
    from kvdock_hicache.store import HiCacheStore  # noqa: PLC0415 - torch

    del pool, region
    return HiCacheStore(config)


@hookimpl
def kvdock_batch_io(store: HiCacheStore, batch: Batch) -> BatchResult:
    """Refuse what no class has a call for: to delete one object, or one namespace."""
    from kvdock import BatchResult, Operation, Outcome  # noqa: PLC0415 - numpy

    if batch.operation in (Operation.EXISTS, Operation.PUT, Operation.GET):
        return store.run(batch)
    return BatchResult.all(batch, Outcome.REFUSED)
