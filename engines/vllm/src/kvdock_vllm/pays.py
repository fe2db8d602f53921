"""Decide for each request how much of its prefix comes from storage.

Above vLLM's lookups, which requests share: a page that does not pay for one request
is still found for another. vLLM is only told up to which token this one may load.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from vllm.v1.kv_offload.base import LookupResult

from kvdock.pays import Prefix

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, FloatArray, Int64Array
    from kvdock.pays import LoadCurve
    from kvdock_vllm.tier import KvdockTier

_TRIED = 8
"""Prefixes that vLLM evaluates for a model of which not each can be restored."""


@attrs.define(eq=False)
class LoadDecisions:
    """The decisions of the requests under way; on the scheduler's thread."""

    _scheduler: Any
    _tier: KvdockTier
    _ends: dict[str, int | None] = attrs.field(factory=dict)

    def decide(self, request: Any, computed: int, most: int | None) -> bool:  # noqa: ANN401 - vLLM's Request
        """Limit what vLLM loads for a request; return False until that is known.

        The device has `computed` of its tokens, and vLLM may load `most` more.
        """
        name = request.request_id
        state = self._scheduler._req_status[name]  # noqa: SLF001 - vLLM's own
        if state.transfer_jobs or request.skip_reading_prefix_cache:
            return True
        if name not in self._ends:
            state.update_offload_keys()
            state.num_locally_computed_tokens = computed
            longest = self._restorable(state, most)
            if longest is None:
                return False
            self._ends[name] = self._end(state, longest) if longest else None
        end = self._ends[name]
        if end is not None:
            asked = (request.kv_transfer_params or {}).get("max_load_tokens")
            own = asked if type(asked) is int and asked >= 0 else end
            state.max_load_tokens = min(own, max(0, end - computed))
        return True

    def forget(self, name: str) -> None:
        """Forget a request that has ended, or whose load begins to reach the device."""
        self._ends.pop(name, None)
        self._tier.unlimit(name)

    def _restorable(self, state: Any, most: int | None) -> int | None:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return the tokens that vLLM would load of a request, without loading any."""
        probe = copy.copy(self._scheduler)
        probe.manager = SimpleNamespace(lookup=self._peek)
        probe._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)  # noqa: SLF001 - a copy's
        probe._chunks_being_loaded = None  # noqa: SLF001 - same
        found: int | None = probe._lookup_complete_chunks(state, most)  # noqa: SLF001 - vLLM's own evaluator
        return found

    def _peek(self, key: Any, context: Any) -> LookupResult:  # noqa: ANN401 - vLLM's
        """Look a page up, and promote nothing."""
        near = self._near.lookup(key, context)
        if near is not LookupResult.MISS:
            return LookupResult.HIT
        tier = self._tier
        if not context.load_tier_filter.allows(tier.medium, tier.locality):
            return LookupResult.MISS
        found: LookupResult = tier.lookup(key, context)
        return found

    @property
    def _near(self) -> Any:  # noqa: ANN401 - vLLM's CPUOffloadingManager
        return self._scheduler.manager.primary_tier

    def _end(self, state: Any, longest: int) -> int | None:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return up to which token a request loads; None for all that is there."""
        groups = self._scheduler.config.kv_group_configs
        computed = state.num_locally_computed_tokens
        step = max(group.tokens_per_chunk for group in groups)
        tokens = np.append(np.arange(0, longest, step), longest)
        load_s = np.zeros(len(tokens))
        curves: dict[tuple[str, str], LoadCurve] = {}
        for group, mine in zip(groups, state.group_states, strict=True):
            load_s += self._load_seconds(group, mine, state, tokens, curves)
        if not curves:  # host memory has it all
            return None
        decision = self._tier.attached.pays.decide(
            Prefix(
                state.req.request_id,
                self._prefixes(state, tokens),
                load_s,
                computed + tokens,
                state.req.num_tokens,
                curves,
            )
        )
        self._tier.limit(state.req.request_id, decision.limit)
        if decision.pages + 1 == len(tokens):
            return None
        return int(computed) + int(tokens[decision.pages])

    def _prefixes(self, state: Any, tokens: Int64Array) -> BoolArray:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return which of these numbers of tokens could be loaded, as vLLM sees it."""
        if not self._scheduler._sliding_window_groups:  # noqa: SLF001 - vLLM's own
            return np.ones(len(tokens), np.bool_)
        allowed = np.zeros(len(tokens), np.bool_)
        allowed[[0, -1]] = True
        tried = copy.copy(state)
        for most in tokens[1:-1][:: max(1, len(tokens) // _TRIED)].tolist():
            tried.max_load_tokens = most
            allowed |= tokens == (self._restorable(tried, None) or 0)
        return allowed

    def _load_seconds(
        self,
        group: Any,  # noqa: ANN401 - vLLM's GroupOffloadConfig
        mine: Any,  # noqa: ANN401 - vLLM's RequestGroupState
        state: Any,  # noqa: ANN401 - vLLM's RequestOffloadState
        tokens: Int64Array,
        curves: dict[tuple[str, str], LoadCurve],
    ) -> FloatArray:
        """Return what loading so many tokens of one group takes, float64 (n,)."""
        computed, size = state.num_locally_computed_tokens, group.tokens_per_chunk
        first = computed // size
        ends = -(-(computed + tokens) // size) - first
        keys = mine.offload_keys[first : first + int(ends[-1])]
        window = group.sliding_window_size_in_chunks
        if window is not None:
            # Each prefix needs the end of it alone; the longest one stands for all.
            keys, ends = keys[-window:], np.minimum(ends, window)
        context, miss = state.req_context, LookupResult.MISS
        far = [key for key in keys if self._near.lookup(key, context) is miss]
        if not far:
            return np.zeros(len(tokens))
        away = set(far)
        gone = np.array([key in away for key in keys], np.bool_)
        counts = np.concatenate([[0], np.cumsum(gone)])[np.minimum(ends, len(keys))]
        seconds: FloatArray = self._tier.load_seconds(far, context, curves)[counts]
        return seconds


def work_of(output: Any) -> list[tuple[int, int]]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Return prefix and tokens of each request of a step."""
    scheduled = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    found = [
        *((one.req_id, one.num_computed_tokens) for one in output.scheduled_new_reqs),
        *zip(cached.req_ids, cached.num_computed_tokens, strict=True),
    ]
    return [(prefix, scheduled[name]) for name, prefix in found if name in scheduled]
