"""kvdock's simulated policies beside KVCache.AI's simulator (`kvcache-simulator`).

`benchmarks/eviction_policies.py` says what a page-wise LRU and the best of all policies
restore; kvdock's own policy is judged beside them. Here another project's program
computes both from the same requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import eviction_policies
import numpy as np
import numpy.typing as npt

SHARES = (0.05, 0.1, 0.25, 0.5)
"""Room, as a share of the load's different blocks."""
POLICIES = {
    "lru": eviction_policies.replay_lru,
    "optimal": eviction_policies.replay_optimum,
}
Requests = Sequence[npt.NDArray[np.int64]]


def theirs(requests: Requests, capacity: int, policy: str) -> float:
    """Return the hit rate by kvcache-simulator, of all requests but the first."""
    trace: Any = import_module("kvcache_sim.trace")
    plan: Any = import_module("kvcache_sim.plan")
    policies: Any = import_module("kvcache_sim.policies")
    lines = [
        json.dumps({"hash_ids": one.tolist(), "input_length": len(one)})
        for one in requests
    ]
    read = trace.parse_trace_lines(lines, block_size=1)
    made = plan.build_execution_plan(read, warmup_fraction=1.5 / len(requests))
    return float(policies.simulate_policy(made, policy, capacity).hitRate)


def measure(requests: Requests) -> dict[str, dict[str, dict[str, float]]]:
    """Return both hit rates by policy and share of room."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    unique = 1 + max(int(one.max()) for one in requests)
    asked = sum(map(len, requests))
    for share in SHARES:
        capacity = int(share * unique)
        # It counts only once its memory is full: blocks that never come again fill it.
        filled = [unique + np.arange(capacity), *requests]
        for policy, replay in POLICIES.items():
            rates = {
                "kvdock": round(replay(filled, capacity).restored / asked, 4),
                "kvcache_simulator": round(theirs(filled, capacity, policy), 4),
            }
            figures.setdefault(policy, {})[f"{share:g}"] = rates
            print(f"  {policy:8} room for {share:4.0%}: {rates}", flush=True)
    return figures
