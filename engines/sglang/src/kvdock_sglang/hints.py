# ruff: noqa: ANN401 - SGLang's own objects
"""Hints of SGLang's requests, which SGLang carries to the request and no further.

A storage call belongs to a node of the prefix tree, and a hint to a request. So the
page hashes of a request with hints are worked out when it arrives, for what is stored
already, and whenever SGLang puts its tokens into the tree, for what is stored later:
a write looks up which of its pages have a hint.

Source: SGLang 0.5.23, `managers/scheduler.py:Scheduler._prefetch_kvcache`,
`mem_cache/unified_radix_cache.py:checkpoint_into_tree`, `managers/kv_hints.py`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.hints import Hints, PagesOfPool, RequestHints
from kvdock.retention import Retention

if TYPE_CHECKING:
    from kvdock import AttachedPool
    from kvdock.arrays import Int64Array

ARRIVAL = "sglang.srt.managers.scheduler.Scheduler._prefetch_kvcache"
INSERT = (
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
)

_MARK = "_kvdock_hints"
_MOST_PAGES = 1 << 18
"""Pages that are awaited with a hint; the oldest are forgotten first."""
_AWAITED_S = 600.0
"""How long a page is awaited: SGLang stores one soon after it is computed, or never."""
_NOTHING = Retention()


@attrs.define(eq=False)
class RequestPages:
    """The pages that requests with hints have, or will have.

    Noted on the scheduler's thread, and looked up on those of the writes.
    """

    hints: Hints
    _awaited: dict[str, tuple[float, Retention]] = attrs.field(factory=dict, init=False)

    def begin(self, cache: Any, req: Any, pools: Sequence[AttachedPool]) -> None:
        """Read the hints of a request that has arrived, once."""
        if req.kv_hints is None or hasattr(req, _MARK):
            return
        hints = self.hints.read(str(req.rid), req.kv_hints)
        setattr(req, _MARK, hints)
        if not hints.hints:
            return
        hashes_of = partial(page_hashes, cache, req)
        hashes = hashes_of(req.full_untruncated_fill_ids)
        ends = self._note(hints, hashes, cache.page_size)
        pages = [PagesOfPool(one, hashes, ends) for one in pools]
        self.hints.apply(hints, pages, pools, hashes_of)

    def inserted(self, cache: Any, req: Any, up_to: int) -> None:
        """Await the pages of a request that SGLang puts into its tree."""
        hints: RequestHints | None = getattr(req, _MARK, None)
        if hints is not None and hints.hints:
            tokens = req.full_untruncated_fill_ids[:up_to]
            self._note(hints, page_hashes(cache, req, tokens), cache.page_size)

    def _note(
        self, hints: RequestHints, hashes: Sequence[str], page: int
    ) -> Int64Array:
        """Await pages; return the token behind each, int64 (n,)."""
        until_s, known = time.monotonic() + _AWAITED_S, self._awaited
        ends = page * np.arange(1, len(hashes) + 1)
        for name, times in zip(hashes, hints.times(ends, page), strict=True):
            known.pop(name, None)
            if times:
                known[name] = until_s, times
        while len(known) > _MOST_PAGES:
            del known[next(iter(known))]
        return ends

    def times(self, hashes: Sequence[str]) -> list[Retention]:
        """Return how long pages that are stored now are kept and served."""
        now_s, known = time.monotonic(), self._awaited
        if not known:
            return [_NOTHING] * len(hashes)
        found = (known.get(one, (0.0, _NOTHING)) for one in hashes)
        return [times if until_s > now_s else _NOTHING for until_s, times in found]


def page_hashes(cache: Any, req: Any, tokens: Sequence[int]) -> list[str]:
    """Return the hashes of a prompt's pages, with a request's salt and extra key."""
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415 - the engine
    from sglang.srt.mem_cache.utils import (  # noqa: PLC0415 - same
        get_storage_hash_str,
    )

    key = RadixKey(
        tokens if isinstance(tokens, array) else array("q", tokens),
        req.extra_key,
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=req.cache_salt,
    ).page_aligned(cache.page_size)
    if not len(key):
        return []
    found: list[str] = get_storage_hash_str(key, None, page_size=cache.page_size)
    return found
