"""Time what stands between a prefix and a backend: keys, addresses, hits.

Usage: python benchmarks/plan.py

Four pools (MLA with an indexer, and both again for the draft) as kvdock plans
them, beside the loop over pages that engines' storage backends write. The same
keys, addresses and hits come out of both, which is checked. Each figure is the
best of several runs; the collector is off while they are timed. The last line
is one JSON object.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Block, HitPolicy, Hits, Layout, Namespace, Region, Shard, evaluate
from kvdock.keys import build_keys, key_suffixes
from kvdock.models import Deployment, assemble, load_model
from kvdock.namespace import namespace_digest, namespace_record

if TYPE_CHECKING:
    from kvdock import PoolSpec
    from kvdock.arrays import BoolArray

PAGES = 4096
PREFIX_PAGES = 1 << 20
BASE_ADDRESS = 1 << 32


@attrs.frozen(eq=False)
class Case:
    """Pools, their memory, and pages to look for."""

    pools: tuple[PoolSpec, ...]
    regions: dict[str, Region]
    suffixes: dict[str, tuple[str, ...]]
    digest: str
    hashes: list[str]
    indices: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    exists: dict[str, BoolArray]


def case_of(pages: int) -> Case:
    """Describe the pools and invent addresses, hashes and answers."""
    model = load_model("deepseek-v3.2")
    deployment = Deployment(layout=Layout.PAGE_FIRST)
    pools = assemble(model, deployment, draft="mtp").pools
    shard = Shard()
    indices = np.random.default_rng(7).permutation(pages)
    # Slots are for the loop, which runs on the short case alone.
    tokens = model.page_tokens if pages == PAGES else 1
    exists = {pool.name: np.ones(pages, np.bool_) for pool in pools}
    exists["indexer"][pages - 3 :] = False
    return Case(
        pools=pools,
        regions={
            # No byte is touched, so an address is all the memory there is.
            pool.name: Region.of(
                pool,
                shard,
                [Block(BASE_ADDRESS, pool.page_bytes(shard) * pages)],
                pages,
            )
            for pool in pools
        },
        suffixes={pool.name: key_suffixes(pool, shard) for pool in pools},
        digest=namespace_digest(namespace_record(Namespace(model="m"), pools)),
        hashes=[
            hashlib.sha256(page.to_bytes(4, "little")).hexdigest()
            for page in range(pages)
        ],
        indices=indices,
        slots=(indices[:, None] * tokens + np.arange(tokens)).ravel(),
        exists=exists,
    )


def planned(case: Case) -> tuple[list[str], npt.NDArray[np.int64], Hits]:
    """Plan a prefix as kvdock does; returns what the last pool got."""
    keys: list[str] = []
    addresses = np.zeros((0, 0), np.int64)
    for pool in case.pools:
        keys = build_keys(case.digest, case.hashes, case.suffixes[pool.name])
        addresses, _ = case.regions[pool.name].addresses(case.indices)
    return keys, addresses, evaluate(case.pools, case.exists, len(case.hashes))


def looped(
    case: Case, *, by_slot: bool = True
) -> tuple[list[str], list[int], list[int]]:
    """Do the same page by page, as backends of engines do it today.

    Source: SGLang 0.5.23, `get_page_buffer_meta`, which is handed the slot of
    every token and steps over them; `by_slot=False` spares it that.
    """
    keys: list[str] = []
    pointers: list[int] = []
    restorable = set(range(1, len(case.hashes) + 1))
    for pool in case.pools:
        region = case.regions[pool.name]
        base, size = int(region.bases[0, 0]), int(region.sizes[0, 0])
        keys, pointers, sizes = [], [], []
        for page in case.hashes:
            for suffix in case.suffixes[pool.name]:
                keys.append(f"{case.digest}/{page}{suffix}")
        tokens = pool.page_tokens if by_slot else 1
        slots = (case.slots if by_slot else case.indices).tolist()
        for place in range(0, len(slots), tokens):
            pointers.append(base + slots[place] // tokens * size)
            sizes.append(size)
        if not pool.required:
            continue
        assert pool.hit_policy is HitPolicy.ALL_PAGES  # noqa: S101 - of these pools
        there = case.exists[pool.name].tolist()
        boundary = len(there)
        for place, found in enumerate(there):
            if not found:
                boundary = place
                break
        restorable &= set(range(1, boundary + 1))
    return keys, pointers, sorted(restorable)


def best_ms(work: Callable[[], object], times: int) -> float:
    """Return the shortest of several runs in milliseconds."""
    found = []
    for _ in range(times):
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) * 1e3)
        gc.enable()
    return min(found)


def leave_room_in_the_heap() -> list[str]:
    """Leave free room for a run's keys in arenas that stay mapped.

    Otherwise the state of the heap decides: where the last arena happens to be
    full, each run maps and unmaps its own, and takes 1.05 ms instead of 0.60.

    Returns:
        What keeps the arenas mapped; hold it as long as runs are timed.
    """
    every = [f"{number:0128d}" for number in range(16 * PAGES)]
    return every[::4]


def check(case: Case) -> None:
    """Make sure that both ways come to the same."""
    keys, addresses, hits = planned(case)
    other_keys, pointers, restorable = looped(case)
    assert keys == other_keys  # noqa: S101 - figures of different work mean nothing
    assert addresses.ravel().tolist() == pointers  # noqa: S101 - same
    assert list(hits.prefixes) == restorable  # noqa: S101 - same


def main() -> None:
    """Measure and print."""
    case = case_of(PAGES)
    check(case)
    held = leave_room_in_the_heap()
    plan_ms = best_ms(lambda: planned(case), 15)
    loop_ms = best_ms(lambda: looped(case), 5)
    page_loop_ms = best_ms(lambda: looped(case, by_slot=False), 5)
    hits_ms = best_ms(lambda: evaluate(case.pools, case.exists, PAGES), 15)
    del held
    print(f"{len(case.pools)} pools x {PAGES} pages")
    print(f"  arrays  {plan_ms:8.2f} ms, of which hits {hits_ms:.3f} ms")
    print(f"  loop    {loop_ms:8.2f} ms as engines do it, with a slot per token")
    print(f"  loop    {page_loop_ms:8.2f} ms if it were given an index per page")
    print("growth of a prefix, microseconds a page over 4 pools")
    prefix_ms = 0.0
    for pages in (PAGES, 16 * PAGES, PREFIX_PAGES):
        longer = case_of(pages)
        prefix_ms = best_ms(lambda longer=longer: planned(longer), 2)  # type: ignore[misc]  # a default binds the case
        print(f"  {pages:8d} pages {prefix_ms:9.1f} ms {prefix_ms * 1e3 / pages:.3f}")
    figures = {
        "plan_4x4096_ms": round(plan_ms, 2),
        "plan_speedup_vs_loop": round(loop_ms / plan_ms, 1),
        "plan_speedup_vs_page_loop": round(page_loop_ms / plan_ms, 1),
        "prefix_1m_pages_ms": round(prefix_ms, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
