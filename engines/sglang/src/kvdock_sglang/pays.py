# ruff: noqa: ANN401 - SGLang's own objects
"""Decide for each prefetch how much of its prefix is loaded.

What SGLang learns about storage stays true: it is told of all pages that were found,
and prefetches fewer. What computing takes is learned from the scheduler's steps.

Source: SGLang 0.5.23, `managers/scheduler.py:process_batch_result`,
`mem_cache/hybrid_cache/hybrid_cache_controller.py:_storage_hit_query`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.pays import Decision, LoadLimit, Prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.pays import LoadCurve, LoadPolicy
    from kvdock_sglang.attachments import Attachments

STEP = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
_LIMIT = "_kvdock_limit"


def decide(
    attachments: Attachments,
    policy: LoadPolicy,
    operation: Any,
    hashes: Sequence[str],
    page_tokens: int,
) -> int:
    """Return how many of the pages that were found are loaded.

    The operation gets the limit of its load.
    """
    count = len(hashes)
    restorable = np.ones(count + 1, np.bool_)
    listed = operation.pool_storage_result.restorable_prefix_pages
    if listed is not None:
        restorable[1:] = np.isin(np.arange(1, count + 1), list(listed))
    curves: dict[tuple[str, str], LoadCurve] = {}
    pools = {"kv": count}
    for transfer in operation.pool_transfers or ():
        name = str(getattr(transfer.name, "value", transfer.name))
        trailing = "trailing" in str(transfer.hit_policy).lower()
        pools[name] = max(1, len(transfer.keys or ())) if trailing else count
    load_s = np.zeros(count + 1)
    for name, most in pools.items():
        attached = attachments.attached_pool(name)
        if attached is not None and attached.attachment is not None:
            pool = attached.attachment[attached.spec.name]
            load_s += pool.load_seconds(hashes, curves)[
                np.minimum(np.arange(count + 1), most)
            ]
    start = int(operation.storage_start)
    found: Decision = policy.decide(
        Prefix(
            request_of(operation),
            restorable,
            load_s,
            start + np.arange(count + 1) * page_tokens,
            # The last token is computed in any case.
            start + len(operation.token_ids) + 1,
            curves,
        )
    )
    setattr(operation, _LIMIT, found.limit)
    return found.pages


def request_of(operation: Any) -> str:
    """Return the id of the request that a prefetch belongs to."""
    request = getattr(operation, "request_id", "")
    return str(getattr(request, "rid", request))


def limit_of(operation: Any) -> LoadLimit | None:
    """Return the limit of a prefetch, if it has one."""
    return getattr(operation, _LIMIT, None)


def learn_step(policy: LoadPolicy, batch: Any) -> None:
    """Learn from a step whose result was just processed."""
    if batch.launch_ts is None:
        return
    work: list[tuple[int, int]] = []
    if batch.forward_mode.is_extend() and batch.extend_lens:
        work = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
    policy.compute.add(work, batch.launch_ts)
