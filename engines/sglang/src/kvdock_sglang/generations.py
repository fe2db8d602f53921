# ruff: noqa: ANN401 - SGLang's own objects, and arguments that are passed on
"""Storage goes on after an update of the weights, in a generation of their own.

A generation is opened on the scheduler's thread, between two steps, once nothing that
older weights have computed can be stored or served any more: the update has been
answered, no session of updates is open, no memory is released, no request has pages,
and SGLang's own cache is empty. Ranks take these steps together, so all of them come
here at the same one; there they agree on a name. A rank that cannot agree or open in
time stores and finds nothing until the next update.

Where ranks step apart (pipeline stages, DP attention), storage ends at an update.

Source: SGLang 0.5.23, `managers/scheduler.py:process_input_requests`, `flush_cache`.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.errors import KvdockError
from kvdock.generations import Generation
from kvdock.identity import WeightsBy, weights_in
from kvdock_sglang.weight_updates import WEIGHTS, steps_apart

if TYPE_CHECKING:
    from kvdock_sglang.storage import KvdockStorage

STEP = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"

AGREE_S = 5.0
"""How long a rank waits for the words of the others; they are at the same step."""

OPEN_S = 10.0
"""How long a step may take to open a generation: as long as SGLang waits for its
storage threads to stop."""


def open_if_ready(storage: KvdockStorage, scheduler: Any) -> None:
    """Open a generation for weights that were replaced, once none can mix.

    Never raises: without a generation storage answers with misses.
    """
    try:
        _require_same_steps(storage.ranks.pp_size)
        if not _is_empty(scheduler):
            return
        deadline_s = time.monotonic() + OPEN_S
        agreed = _agreed(storage.run, scheduler.weight_updater.tp_cpu_group)
        files = WEIGHTS.files if agreed.run else ""
        named = partial(_with_files, agreed, files, storage.given.own.weights)
        storage.open_generation(named, deadline_s)
    except Exception as error:  # noqa: BLE001 - nothing may reach the engine's loop
        storage.ledger.record_error("opening a generation", error)
        WEIGHTS.settle()


def _require_same_steps(stages: int) -> None:
    if apart := steps_apart(stages):
        raise KvdockError(apart, fix='Attach it again with another "revision".')


def _is_empty(scheduler: Any) -> bool:
    """Return whether nothing that was computed before is in the engine's memory."""
    updater, cache = scheduler.weight_updater, scheduler.tree_cache
    # Its tree in Rust shows no nodes, so their memory is looked at.
    host = cache.cache_controller.mem_pool_host
    return not (
        updater._session is not None  # noqa: SLF001 - SGLang has no other door
        or updater.offload_tags
        or cache.evictable_size()
        or cache.protected_size()
        or host.available_size() < host.logical_size
        or cache.session.slots
        # Requests that wait have no pages yet, or are not idle.
        or not scheduler.is_fully_idle(ignore_waiting=True)
    )


def _agreed(run: str, group: Any) -> Generation:
    """Return the generation that all ranks of a group give their weights.

    Raises:
        KvdockError: If one of them says nothing in time.
    """
    import torch.distributed as dist  # noqa: PLC0415 - the engine's

    own = Generation.private()
    said: list[tuple[bool, str, str]] = [(WEIGHTS.named, WEIGHTS.version, own.version)]
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) > 1:
        # A collective that ends by a deadline would take SGLang's group with it.
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other door
        keys = [f"kvdock/{ranks[0]}/{WEIGHTS.count}/{rank}" for rank in ranks]
        store.set(keys[ranks.index(dist.get_rank())], json.dumps(said[0]))
        try:
            store.wait(keys, timedelta(seconds=AGREE_S))
        except Exception as error:
            raise KvdockError(
                f"not all of {len(ranks)} ranks took part: {error}"
            ) from error
        said = [json.loads(store.get(key)) for key in keys]
    versions = {version for _, version, _ in said}
    if run and len(versions) == 1 and all(named for named, _, _ in said):
        return Generation(run=run, version=versions.pop())
    return Generation(version=said[0][2])


def _with_files(generation: Generation, path: str, weights: WeightsBy) -> Generation:
    """Add what stands for the files that a version was loaded from, if it was."""
    if not path:
        return generation
    return attrs.evolve(generation, weights=weights_in(path, weights))
