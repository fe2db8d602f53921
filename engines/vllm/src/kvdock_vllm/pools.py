"""Attach the pools of an engine to the backends that store them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import (
    Attachment,
    Dock,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.errors import SettingsError, did_you_mean
from kvdock_vllm.rows import pools
from kvdock_vllm.settings import check_host_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdock import Plan, PoolSpec
    from kvdock_vllm.adapters import AdapterFiles
    from kvdock_vllm.identity import Identity
    from kvdock_vllm.settings import Configuration

log = logging.getLogger("kvdock.vllm")


@attrs.define(eq=False)
class Handover:
    """The data that the connector gives its tier, and that tier.

    Args:
        adapters: Adapters of the requests under way.
        tier: Set by the tier.
        tenants: Number of the tenant of each request under way whose salt is listed.
    """

    settings: Configuration
    identity: Identity
    adapters: AdapterFiles
    tier: Any = None
    tenants: dict[str, int] = attrs.field(factory=dict)


def routes(dock: Dock, given: Configuration, specs: Sequence[PoolSpec]) -> Plan:
    """Choose a backend for every pool.

    Raises:
        NoRoute: If no plugin takes a pool; the message is the route table.
        SettingsError: If a route is for a pool that is not there.
    """
    names = [pool.name for pool in specs]
    for name in given.own.routes:
        if name not in names:
            raise SettingsError(
                f"routes: this model has no pool {name!r}",
                fix=did_you_mean(name, names) or f"It has {', '.join(names)}.",
            )
    return dock.plan(
        specs,
        Shard(),
        list(given.own.plugin),
        tiers=given.tiers,
        overrides=dict(given.own.routes),
        needs=RouteRequirements(
            integrity=given.core.integrity,
            staging=given.core.calls.staging,
            tenant_quotas=bool(given.core.tenants.rooms),
        ),
        settings=given.backends,
    )


def check_canonical(config: Any) -> None:  # noqa: ANN401 - vLLM's OffloadingConfig
    """Reject the canonical layout where the pages of some group are not in it.

    Raises:
        SettingsError: With vLLM's conditions.
    """
    if config.canonical_layout and not config.parallel.is_parallelism_agnostic:
        raise SettingsError(
            "canonical_layout: not every KV cache group of this engine can be shared "
            "by engines of other TP sizes (vLLM knows how to for full attention, "
            "sliding windows and latent pages, with tensor parallelism alone)",
            fix="Leave it out: pages are then stored for this TP size.",
        )


def attach(
    handover: Handover,
    identity: Identity,
    spec: Any,  # noqa: ANN401 - vLLM's TieringOffloadingSpec
    rows: memoryview,
    observer: object,
) -> tuple[Attachment, Mapping[int, str]]:
    """Attach every KV cache group as a pool.

    `rows` is vLLM's host memory, uint8 (rows, bytes of a row).

    Returns:
        The attachment, and each group's pool name by the group's number.

    Raises:
        NoRoute: If no plugin takes a pool; the message is the route table.
        KvdockError: If a plugin rejects its memory or its settings, or a group is
            of an unknown class.
    """
    given = handover.settings
    row_bytes = int(spec.kv_bytes_per_chunk)
    check_host_memory(given.own.host_memory, row_bytes)
    shared = spec.replicated_layout or spec.config.canonical_layout
    ranks = 1 if shared else int(spec.config.parallel.world_size)
    described = pools(
        identity.groups,
        row_bytes=row_bytes,
        slot_bytes=int(spec.cpu_page_size_per_worker),
        ranks=ranks,
        whole=identity.stages > 1,
    )
    names = {number: pool.name for number, (pool, _) in described.items()}
    dock = Dock.for_engine(given.used, given)
    dock.add_observer("vllm", observer)
    plan = routes(dock, given, [pool for pool, _ in described.values()])
    count = rows.nbytes // row_bytes
    attachment = Attachment.open(
        dock,
        plan,
        identity.namespace(given.own),
        {
            pool.name: Region.of_rows(pool, Shard(), rows, count, layout)
            for pool, layout in described.values()
        },
        _settings_for(plan, given),
        core=given.core,
        process=identity.process,
    )
    log.info("kvdock stores these pools:\n%s", plan.explain())
    return attachment, names


def _settings_for(plan: Plan, given: Configuration) -> dict[str, Mapping[str, object]]:
    used = plan.backends
    return {name: own for name, own in given.backends.items() if name in used}
