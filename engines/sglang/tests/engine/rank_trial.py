"""One tensor-parallel rank of all trials over gloo; prints what it saw as JSON.

    rank_trial.py RANK SIZE FOLDER SETTINGS [TRIAL]

Each rank writes its pools by the engine's threads, fills its memory with other
bytes, and reads the prefix back; ranks agree by the engine's own reduction.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import controllers  # noqa: E402 - found by the path above
import sgl_kernel  # noqa: E402, F401 - the stand-in comes before SGLang
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import zoo  # noqa: E402

PAGES = 5


def draft_beside_latent_target(
    rank: int, _: int, store: dict[str, Any], group: Any
) -> Any:
    """A replicated target, and a draft model whose heads are divided."""
    target, draft = zoo.mla_host(), zoo.mha_host(layers=1, heads=1)
    # The target is the same on every rank, the draft is not.
    zoo.fill(target, 1)
    zoo.fill(draft, 100 + rank)
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    pages = list(range(PAGES))
    expected = [[zoo.page(pool, n) for n in pages] for pool in (target, draft)]
    with controllers.controller(
        {"kv": target}, store, group=group, late={"draft": draft}
    ) as made:
        every = zoo.slots(target, pages)
        controllers.back_up(made, every, token_ids, [controllers.follows("draft")])
        dist.barrier()
        zoo.fill(target, 7)
        zoo.fill(draft, 8)
        slots = zoo.slots(target, [n + 8 for n in pages])
        loaded = controllers.fetch(
            made, token_ids, slots, [controllers.follows("draft")]
        )
        found = loaded.completed_tokens // zoo.PAGE
    equal = all(
        torch.equal(zoo.page(pool, 8 + n), kept[n])
        for pool, kept in zip((target, draft), expected, strict=True)
        for n in range(found)
    )
    return {"pages": found, "equal": equal}


def states_of_two_ranks(rank: int, _: int, store: dict[str, Any], group: Any) -> Any:
    """A Mamba hybrid whose ranks kept their states at different pages."""
    pools = {"kv": zoo.mha_host(heads=1), "mamba": zoo.mamba_host()}
    for seed, pool in enumerate(pools.values()):
        zoo.fill(pool, 10 * rank + seed)
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    with controllers.controller(pools, store, group=group) as made:
        hashes = controllers.page_hashes(made, token_ids)
        kept = [hashes[1], hashes[3 + rank]]
        states = controllers.states("mamba", zoo.slots(pools["mamba"], [4, 5]), kept)
        every = zoo.slots(pools["kv"], list(range(PAGES)))
        controllers.back_up(made, every, token_ids, [states])
        dist.barrier()
        window = controllers.states(
            "mamba", zoo.slots(pools["mamba"], [9]), ["?"], window=True
        )
        slots = zoo.slots(pools["kv"], [n + 8 for n in range(PAGES)])
        loaded = controllers.fetch(made, token_ids, slots, [window])
    same = torch.equal(zoo.page(pools["mamba"], 9), zoo.page(pools["mamba"], 4))
    return {
        "pages": loaded.completed_tokens // zoo.PAGE,
        "own": loaded.pool_storage_result.restorable_prefix_pages,
        "equal": same,
    }


def latent_target_divided_by_token(
    rank: int, size: int, store: dict[str, Any], group: Any
) -> Any:
    """Decode context parallelism: each rank holds every other token."""
    target = zoo.mla_host(dcp_rank=rank, dcp_size=size)
    zoo.fill(target, 50 + rank)
    page = zoo.PAGE * size
    token_ids = controllers.tokens(3 * page)
    expected = [zoo.page(target, n) for n in range(3)]
    try:
        with controllers.controller(
            {"kv": target}, store, group=group, page=page
        ) as made:
            slots = zoo.slots(target, [0, 1, 2])
            controllers.back_up(made, slots, token_ids, [])
            dist.barrier()
            zoo.fill(target, 9)
            slots = zoo.slots(target, [4, 5, 6])
            loaded = controllers.fetch(made, token_ids, slots, [])
            found = loaded.completed_tokens // page
    except NotImplementedError as error:
        return {"rejected": str(error)}
    equal = all(torch.equal(zoo.page(target, 4 + n), expected[n]) for n in range(found))
    return {"pages": found, "equal": equal}


def divided_heads(rank: int, _: int, store: dict[str, Any], group: Any) -> Any:
    """A target of two heads, of which each rank stores one."""
    target = zoo.mha_host(heads=1)
    zoo.fill(target, rank)
    token_ids = controllers.tokens(4 * zoo.PAGE)
    with controllers.controller({"kv": target}, store, group=group) as made:
        slots = zoo.slots(target, [0, 1, 2, 3])
        controllers.back_up(made, slots, token_ids, [])
    return {}


TRIALS = {
    "draft, bare": draft_beside_latent_target,
    "draft, hooked": draft_beside_latent_target,
    "states, hooked": states_of_two_ranks,
    "dcp, bare": latent_target_divided_by_token,
    "dcp, hooked": latent_target_divided_by_token,
}
"""Bare is SGLang as it is; hooked is with kvdock's entry point."""


def main() -> None:
    """Run one rank through all trials."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = json.loads(sys.argv[4])
    found = {}
    trials = TRIALS
    if sys.argv[5:]:
        trials = {sys.argv[5]: divided_heads}
    for name, trial in trials.items():
        width = size if name.startswith("dcp") else 1
        group = controllers.become_rank(rank, size, folder / "gloo", dcp_size=width)
        if name.endswith("hooked"):
            controllers.close_name_branches()
        store = {**settings, "salt": f"{folder} {name}"}
        found[name] = trial(rank, size, store, group)
        controllers.open_name_branches()
        dist.barrier()
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    # What is left to the end, as the journal's last records, is done by hand:
    # libraries below SGLang may crash while the interpreter takes them down.
    atexit._run_exitfuncs()
    os._exit(0)


if __name__ == "__main__":
    main()
