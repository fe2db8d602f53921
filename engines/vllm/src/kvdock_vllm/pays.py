"""Decide for each request how much of its prefix comes from storage.

Above vLLM's lookups, which requests share: a page that does not pay for one request
is still found for another. vLLM is only told up to which token this one may load.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from vllm.v1.kv_offload.base import LookupResult

from kvdock.pays import Prefix
from kvdock_vllm.lookups import lower_limit

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, FloatArray, Int64Array
    from kvdock.pays import LoadCurve
    from kvdock_vllm.lookups import Lookups
    from kvdock_vllm.tier import KvdockTier

_TRIED = 8
"""Prefixes that vLLM evaluates for a model of which not each can be restored."""


@attrs.define(eq=False)
class LoadDecisions:
    """The decisions of the requests under way; on the scheduler's thread."""

    _lookups: Lookups
    _tier: KvdockTier
    _ends: dict[str, int | None] = attrs.field(factory=dict)

    def admit(self, state: Any, most: int | None) -> bool:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Limit what vLLM loads for a request; return False until that is known.

        vLLM may load `most` tokens more than the device has.
        """
        name = state.req.request_id
        if name not in self._ends:
            longest = self._lookups.restorable(state, most)
            if longest is None:
                return False
            self._ends[name] = self._end(state, longest) if longest else None
        end = self._ends[name]
        if end is not None:
            tokens = max(0, end - state.num_locally_computed_tokens)
            lower_limit(state, self._lookups.limit_of(tokens))
        return True

    def forget(self, name: str) -> None:
        """Forget a request that has ended, or whose load begins to reach the device."""
        self._ends.pop(name, None)
        self._tier.unlimit(name)

    def _end(self, state: Any, longest: int) -> int | None:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return up to which token a request loads; None for all that is there."""
        groups = self._lookups.scheduler.config.kv_group_configs
        computed = state.num_locally_computed_tokens
        tokens = np.append(np.arange(0, longest, self._lookups.step_tokens), longest)
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
        if not self._lookups.has_windows:
            return np.ones(len(tokens), np.bool_)
        allowed = np.zeros(len(tokens), np.bool_)
        allowed[[0, -1]] = True
        tried = copy.copy(state)
        for most in tokens[1:-1][:: max(1, len(tokens) // _TRIED)].tolist():
            tried.max_load_tokens = self._lookups.limit_of(most)
            allowed |= tokens == (self._lookups.restorable(tried, None) or 0)
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
        far = [key for key in keys if self._lookups.host.lookup(key, context) is miss]
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
