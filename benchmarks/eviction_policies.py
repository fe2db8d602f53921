"""Policies of eviction without a store: what a pool of so many pages restores.

A request restores the unbroken prefix of its blocks that is kept; all of them are
kept afterwards. `reuse` is the policy of the segment store, in its own code; the
others are what it is compared with. ARC (Megiddo and Modha, FAST 2003) and S3-FIFO
(Yang et al., SOSP 2023) see the blocks of a request one by one, the last one first,
so that they evict the tail of a prefix before its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvdock_segments.reuse import ReuseHistory

Blocks = npt.NDArray[np.int64]
Requests = Sequence[Blocks]
_SHARE = 64  # of how many pages one goes at a time
_BLOCK_NS = 50_000  # that a block takes: engines load some 20,000 a second


@attrs.frozen
class Replayed:
    """What became of the blocks of a load.

    Args:
        restored: Blocks that were restored.
        stored: Blocks that were stored, again or for the first time.
    """

    restored: int
    stored: int


def _known_prefix(kept: npt.NDArray[np.bool_], request: Blocks) -> int:
    there = kept[request]
    return len(request) if there.all() else int(there.argmin())


def replay_reuse(requests: Requests, capacity: int) -> Replayed:
    """Replay the policy of the segment store."""
    blocks = 1 + max(int(request.max()) for request in requests)
    history = ReuseHistory()
    digests = np.random.default_rng(1).integers(1, 2**63, (blocks, 2)).astype(np.uint64)
    kept = np.zeros(blocks, np.bool_)
    used_ns = np.zeros(blocks, np.int64)
    stored_ns = np.zeros(blocks, np.int64)
    live = np.zeros(0, np.int64)
    now_ns = 10**12
    restored = stored = 0
    for request in requests:
        restored += _known_prefix(kept, request)
        now_ns += _BLOCK_NS * (len(request) + 1)
        times_ns = now_ns - np.arange(len(request))
        there = kept[request]
        again, fresh = request[there], request[~there]
        history.note(stored_ns[again], used_ns[again], now_ns)
        used_ns[again] = times_ns[there]
        used_ns[fresh] = times_ns[~there]
        stored_ns[fresh] = history.begin(digests[fresh], used_ns[fresh])
        kept[fresh] = True
        stored += len(fresh)
        live = np.concatenate([live, fresh])
        over = len(live) - capacity
        if over > 0:
            wanted = max(over, capacity // _SHARE)
            every = np.ones(len(live), np.bool_)
            cold = history.find_cold(
                stored_ns[live], used_ns[live], every, wanted, now_ns
            )
            going = cold.find(stored_ns[live], used_ns[live])
            gone, live = live[going], live[~going]
            history.note_evicted(digests[gone], stored_ns[gone], used_ns[gone], now_ns)
            kept[gone] = False
    return Replayed(restored, stored)


def replay_lru(requests: Requests, capacity: int) -> Replayed:
    """Replay a page-wise LRU that evicts the tail of a prefix first."""
    blocks = 1 + max(int(request.max()) for request in requests)
    kept = np.zeros(blocks, np.bool_)
    used = np.zeros(blocks, np.int64)
    restored = stored = now = 0
    live = np.zeros(0, np.int64)
    for request in requests:
        restored += _known_prefix(kept, request)
        now += len(request)
        used[request] = now - np.arange(len(request))
        fresh = request[~kept[request]]
        stored += len(fresh)
        live = np.concatenate([live, fresh])
        kept[fresh] = True
        over = len(live) - capacity
        if over > 0:
            order = np.argpartition(used[live], over - 1)
            kept[live[order[:over]]] = False
            live = live[order[over:]]
    return Replayed(restored, stored)


def replay_optimum(requests: Requests, capacity: int) -> Replayed:
    """Replay the best that a policy can do that knows all later requests.

    What is used again the latest goes (Belady); of pages that are used again by the
    same request, the last of its prefix.
    """
    blocks = 1 + max(int(request.max()) for request in requests)
    longest = max(map(len, requests))
    later = np.full(blocks, len(requests), np.int64)
    next_use = []
    for number in range(len(requests) - 1, -1, -1):
        next_use.append(later[requests[number]])
        later[requests[number]] = number
    kept = np.zeros(blocks, np.bool_)
    rank = np.zeros(blocks, np.int64)
    live = np.zeros(0, np.int64)
    restored = stored = 0
    for request, uses in zip(requests, reversed(next_use), strict=True):
        restored += _known_prefix(kept, request)
        rank[request] = uses * longest + np.arange(len(request))
        fresh = request[~kept[request]]
        kept[fresh] = True
        live = np.concatenate([live, fresh])
        over = len(live) - capacity
        if over > 0:
            order = np.argpartition(-rank[live], over - 1)
            kept[live[order[:over]]] = False
            live = live[order[over:]]
        stored += int(np.count_nonzero(kept[fresh]))
    return Replayed(restored, stored)


def replay_arc(requests: Requests, capacity: int) -> Replayed:  # noqa: C901, PLR0912 - one algorithm
    """Replay ARC."""
    once: OrderedDict[int, None] = OrderedDict()
    often: OrderedDict[int, None] = OrderedDict()
    once_ghosts: OrderedDict[int, None] = OrderedDict()
    often_ghosts: OrderedDict[int, None] = OrderedDict()
    target = 0.0
    restored = stored = 0

    def evict(*, ghost_of_often: bool) -> None:
        few = len(once) > target or (ghost_of_often and len(once) == target)
        if (once and few) or not often:
            once_ghosts[once.popitem(last=False)[0]] = None
        else:
            often_ghosts[often.popitem(last=False)[0]] = None

    for request in requests:
        blocks = request.tolist()
        restored += next(
            (
                at
                for at, one in enumerate(blocks)
                if one not in once and one not in often
            ),
            len(blocks),
        )
        for one in reversed(blocks):
            if one in once:
                del once[one]
                often[one] = None
                continue
            if one in often:
                often.move_to_end(one)
                continue
            stored += 1
            full = len(once) + len(often) >= capacity
            if one in once_ghosts or one in often_ghosts:
                many, others = len(once_ghosts), len(often_ghosts)
                if one in once_ghosts:
                    target = min(capacity, target + max(others / many, 1))
                else:
                    target = max(0, target - max(many / others, 1))
                if full:
                    evict(ghost_of_often=one in often_ghosts)
                once_ghosts.pop(one, None)
                often_ghosts.pop(one, None)
                often[one] = None
                continue
            if len(once) + len(once_ghosts) >= capacity:
                if len(once) < capacity:
                    once_ghosts.popitem(last=False)
                    if full:
                        evict(ghost_of_often=False)
                else:
                    once.popitem(last=False)
            elif full:
                ghosts = len(once_ghosts) + len(often_ghosts)
                if len(once) + len(often) + ghosts >= 2 * capacity:
                    often_ghosts.popitem(last=False)
                evict(ghost_of_often=False)
            once[one] = None
    return Replayed(restored, stored)


def replay_s3_fifo(requests: Requests, capacity: int) -> Replayed:  # noqa: C901 - one algorithm
    """Replay S3-FIFO: a tenth for new pages, ghosts for as many as the rest has."""
    small: dict[int, int] = {}  # uses by block, in the order of arrival
    main: dict[int, int] = {}
    ghosts: dict[int, None] = {}
    small_pages = max(1, capacity // 10)
    main_pages = capacity - small_pages
    restored = stored = 0

    def evict_main() -> None:
        while main:
            one = next(iter(main))
            uses = main.pop(one)
            if not uses:
                return
            main[one] = uses - 1

    def evict_small() -> None:
        while small:
            one = next(iter(small))
            if small.pop(one) > 1:
                main[one] = 0
                if len(main) > main_pages:
                    evict_main()
                continue
            ghosts[one] = None
            if len(ghosts) > main_pages:
                del ghosts[next(iter(ghosts))]
            return

    for request in requests:
        blocks = request.tolist()
        restored += next(
            (
                at
                for at, one in enumerate(blocks)
                if one not in small and one not in main
            ),
            len(blocks),
        )
        for one in reversed(blocks):
            queue = small if one in small else main
            if one in queue:
                queue[one] = min(3, queue[one] + 1)
                continue
            stored += 1
            while len(small) + len(main) >= capacity:
                if len(small) >= small_pages or not main:
                    evict_small()
                else:
                    evict_main()
            if one in ghosts:
                del ghosts[one]
                main[one] = 0
            else:
                small[one] = 0
    return Replayed(restored, stored)


POLICIES: dict[str, Callable[[Requests, int], Replayed]] = {
    "reuse": replay_reuse,
    "LRU": replay_lru,
    "ARC": replay_arc,
    "S3-FIFO": replay_s3_fifo,
    "optimum": replay_optimum,
}
"""Policies by the name that the table has; `reuse` is kvdock's without a store."""
