"""Share host memory among the prefixes that requests load.

vLLM takes a row of host memory for each page that it finds in storage, and evicts
others for it. Prefixes that do not fit beside each other evict each other's pages, and
a prefix with more pages than there are rows evicts its own, without end. Therefore a
request is first looked up without loading. It loads as much of its prefix as all rows
can hold, and waits until that has rows beside the loads of others.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.events import HostMemoryShared
from kvdock_vllm.lookups import lower_limit

if TYPE_CHECKING:
    from kvdock_vllm.lookups import Lookups

_GUESSES = 16
"""Lengths of a prefix that are tried, by interpolation, for the longest that fits."""


@attrs.define(eq=False)
class Load:
    """The prefix of one request, from its lookup until it reaches the device.

    Args:
        context: vLLM's ReqContext of the request.
        computed: Tokens that the device has.
        found: Tokens that could be loaded beyond them.
        tokens: Tokens that are loaded.
        limit: The `max_load_tokens` for that; None where all is loaded.
        needed: Rows that all that was found would take.
        pages: Pages that take rows of host memory meanwhile.
        asked: The last step in which vLLM has asked for it.
        since_s: Since when it waits for rows; None while it does not.
        admitted: Whether it has its rows.
        offered: Whether vLLM was told of it when all pages were there.
        pinned: Its pages that vLLM may not evict.
        told: Tokens of it that observers know to be computed for lack of room.
    """

    context: Any
    computed: int
    found: int
    tokens: int
    limit: int | None
    needed: int
    pages: Collection[Any]
    asked: int = 0
    since_s: float | None = None
    admitted: bool = False
    offered: bool = False
    pinned: set[Any] = attrs.field(factory=set)
    told: int = 0

    @property
    def unpinned(self) -> list[Any]:
        """Its pages that are on their way, or lost."""
        if len(self.pinned) == len(self.pages):
            return []
        return [key for key in self.pages if key not in self.pinned]


@attrs.define(eq=False)
class HostMemory:
    """The rows of vLLM's host memory, and the loads that share them.

    On the scheduler's thread. A row is spoken for from the moment that a load is
    admitted until its pages are on their way to the device. Pages that are there
    already are pinned as vLLM pins what is stored from them, whatever it evicts by.

    Args:
        rows: All of them.
        wait_s: Returns how long a load may wait for its rows, by the tokens that the
            device has and those that are loaded.
    """

    _lookups: Lookups
    _rows: int
    _wait_s: Callable[[int, int], float]
    _notify: Callable[[HostMemoryShared], None]
    _clock: Callable[[], float] = time.monotonic
    _loads: dict[str, Load] = attrs.field(factory=dict)
    _reserved: Counter[Any] = attrs.field(factory=Counter)
    _step: int = 0

    def admit(self, state: Any, most: int | None) -> bool:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Limit what vLLM loads for a request; return False while it has to wait.

        vLLM may load `most` tokens more than the device has.
        """
        name = state.req.request_id
        load = self._loads.get(name)
        computed = state.num_locally_computed_tokens
        if load is None or load.computed != computed or self._has_lost(load):
            load = self._look_up(state, most, load)
            if load is None:
                return False
            self._loads[name] = load
        load.asked = self._step
        if not load.admitted:
            if not self._has_rows(load):
                load.since_s = self._clock() if load.since_s is None else load.since_s
                waited_s = self._clock() - load.since_s
                if waited_s < self._wait_s(load.computed, load.tokens):
                    return False
                free = self._free_rows()
                if self._rows_for(load.pages) > free and not self._shorten(
                    load, state, most, free, self._rows_for
                ):
                    return False
            self._take_rows(load)
            self._tell(name, load)
        load.offered = not load.unpinned
        if load.limit is not None:
            lower_limit(state, load.limit)
        return True

    def _tell(self, request: str, load: Load) -> None:
        computed = max(0, load.found - load.tokens - load.told)
        load.told += computed
        if computed or load.since_s is not None:
            waited_s = 0.0 if load.since_s is None else self._clock() - load.since_s
            self._notify(
                HostMemoryShared(
                    request=request,
                    rows=self._rows,
                    pages=load.needed,
                    waited_s=waited_s,
                    computed_tokens=computed,
                )
            )
        load.since_s = None

    def load_nothing(self, name: str) -> None:
        """Compute a request: vLLM has found nothing of it, or it has lost its pages."""
        load = self._loads.get(name)
        if load is not None:
            self._give_back(load)
            load.admitted, load.tokens, load.limit, load.pages = True, 0, 0, ()
            if not load.found:  # others may store its pages meanwhile
                del self._loads[name]

    def forget(self, name: str) -> None:
        """Give back the rows of a request that has ended, or whose pages vLLM holds."""
        load = self._loads.pop(name, None)
        if load is not None:
            self._give_back(load)

    def end_step(self, finished: Iterable[str]) -> None:
        """Forget requests that have ended, and pin what has been loaded."""
        for name in finished:
            self.forget(name)
        self.pin()
        self._step += 1

    def pin(self) -> None:
        """Let vLLM evict nothing that has been loaded."""
        for load in self._loads.values():
            if load.admitted:
                self._pin(load)

    def unpin_idle(self) -> bool:
        """Let vLLM evict loads that wait for room on the device; return whether any.

        What is stored comes before them: it is lost otherwise, and they are repeated.
        """
        idle = [one for one in self._loads.values() if one.offered and one.pinned]
        for load in idle:
            self._unpin(load)
        return bool(idle)

    def close(self) -> None:
        """Let vLLM evict what it wants."""
        for name in [*self._loads]:
            self.forget(name)

    def reset(self) -> None:
        """Forget everything: vLLM empties host memory, with the pins on its rows."""
        self._loads.clear()
        self._reserved.clear()

    def _look_up(
        self,
        state: Any,  # noqa: ANN401 - same
        most: int | None,
        before: Load | None,
    ) -> Load | None:
        """Return the prefix that fits into all rows; None until that is known."""
        if before is not None:
            self._give_back(before)
        tokens = self._lookups.restorable(state, most)
        pages = self._lookups.pages(state, most) if tokens else set()
        if tokens is None or pages is None:
            return None
        computed = state.num_locally_computed_tokens
        load = Load(
            state.req_context, computed, tokens, tokens, None, len(pages), pages
        )
        if before is not None:  # it begins anew: some of its pages were lost
            load.since_s, load.told = before.since_s, before.told
        if len(pages) > self._rows and not self._shorten(
            load, state, most, self._rows, len
        ):
            return None
        return load

    def _shorten(
        self,
        load: Load,
        state: Any,  # noqa: ANN401 - same
        most: int | None,
        rows: int,
        rows_for: Callable[[Collection[Any]], int],
    ) -> bool:
        """Cut a load to the longest beginning that takes so many rows.

        Return False until that is known.
        """
        step, computed = self._lookups.step_tokens, load.computed
        low, rows_low = 0, 0
        high, rows_high = load.tokens, rows_for(load.pages)
        best: tuple[int, int, Collection[Any]] = 0, 0, ()
        tried = copy.copy(state)
        for guess in range(_GUESSES):
            share = (rows - rows_low) / max(1, rows_high - rows_low)
            tokens = low + int((high - low) * (0.5 if guess % 2 else share))
            tokens = (computed + tokens) // step * step - computed
            if tokens <= low:
                tokens = (computed + low) // step * step + step - computed
            if tokens >= high:
                break
            limit = self._lookups.limit_of(tokens)
            tried.max_load_tokens = state.max_load_tokens
            lower_limit(tried, limit)
            restored = self._lookups.restorable(tried, most)
            pages = self._lookups.pages(tried, most)
            if restored is None or pages is None:
                return False
            needed = rows_for(pages)
            if needed > rows:
                high, rows_high = tokens, needed
                continue
            low, rows_low = tokens, needed
            best = max(best, (restored, limit, pages), key=lambda one: one[0])
        load.tokens, load.limit, load.pages = best
        return True

    def _has_lost(self, load: Load) -> bool:
        """Return whether a page of a load is gone: it has failed, or was evicted."""
        return load.admitted and any(
            self._references(key) is None for key in load.unpinned
        )

    def _has_rows(self, load: Load) -> bool:
        """Return whether a load has its turn, and a row for each of its pages."""
        if all(
            key in self._reserved or self._references(key) is not None
            for key in load.pages
        ):
            return True  # nothing is to be loaded for it alone
        for earlier in self._loads.values():
            if earlier is load:
                break
            if not earlier.admitted and earlier.asked >= self._step - 1:
                return False
        return self._rows_for(load.pages) <= self._free_rows()

    def _rows_for(self, pages: Collection[Any]) -> int:
        """Return how many rows that are free, or may be evicted, pages would take."""
        return sum(
            1
            for key in pages
            if key not in self._reserved and not self._references(key)
        )

    def _free_rows(self) -> int:
        """Return how many rows are free or may be evicted, and not spoken for."""
        host = self._lookups.host
        usable = host._get_num_free_chunks() + host._num_evictable_cache_chunks  # noqa: SLF001 - vLLM's own count
        awaited = {
            key
            for load in self._loads.values()
            if load.admitted
            for key in load.unpinned
            if not self._references(key)
        }
        return int(usable) - len(awaited)

    def _references(self, key: Any) -> int | None:  # noqa: ANN401 - vLLM's OffloadKey
        """Return how many hold a page in host memory; -1 on its way, None if absent."""
        chunk = self._lookups.host._policy.get(key)  # noqa: SLF001 - vLLM's own record
        return None if chunk is None else int(chunk.ref_cnt)

    def _take_rows(self, load: Load) -> None:
        load.admitted = True
        self._reserved.update(load.pages)
        self.pin()

    def _give_back(self, load: Load) -> None:
        if not load.admitted:
            return
        self._unpin(load)
        load.admitted = False
        for key in load.pages:
            self._reserved[key] -= 1
            if not self._reserved[key]:
                del self._reserved[key]

    def _pin(self, load: Load) -> None:
        ready = [
            key
            for key in load.unpinned
            if (references := self._references(key)) is not None and references >= 0
        ]
        self._lookups.host.prepare_read(ready, load.context)
        load.pinned.update(ready)

    def _unpin(self, load: Load) -> None:
        self._lookups.host.complete_read(load.pinned, load.context)
        load.pinned = set()
