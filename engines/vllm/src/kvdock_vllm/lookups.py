"""Look prefixes up with vLLM's own evaluator, and load nothing.

vLLM's lookup takes a row of host memory for each page that it finds in storage. Here
it runs on a copy of vLLM's scheduler whose pages are only looked at.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
from vllm.v1.kv_offload.base import LookupResult

if TYPE_CHECKING:
    from kvdock_vllm.tier import KvdockTier


@attrs.frozen(eq=False)
class Lookups:
    """Lookups for requests of one scheduler; on its thread.

    Args:
        scheduler: vLLM's OffloadingConnectorScheduler.
    """

    scheduler: Any
    tier: KvdockTier

    @property
    def host(self) -> Any:  # noqa: ANN401 - vLLM's CPUOffloadingManager
        """Return vLLM's bookkeeping of host memory."""
        return self.scheduler.manager.primary_tier

    def state(self, request: Any) -> Any:  # noqa: ANN401 - vLLM's Request and RequestOffloadState
        """Return what vLLM's connector knows of a request."""
        return self.scheduler._req_status[request.request_id]  # noqa: SLF001 - vLLM's own

    def restorable(self, state: Any, most: int | None) -> int | None:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return the tokens that vLLM would load; None until that is known.

        It may load `most` of them, as `_max_loadable_tokens` says.
        """
        return self._evaluate(state, most, self.look)

    def pages(self, state: Any, most: int | None) -> set[Any] | None:  # noqa: ANN401 - vLLM's RequestOffloadState
        """Return the pages that vLLM has in host memory when it loads a request.

        Those it loads, and those that it finds on the way to them: with several groups
        it looks further while pages of one are on their way. None until they are known.
        """
        answers: dict[Any, LookupResult] = {}
        for found in (LookupResult.HIT, LookupResult.HIT_PENDING):

            def noted(key: Any, context: Any, found: LookupResult = found) -> Any:  # noqa: ANN401 - vLLM's OffloadKey, ReqContext, LookupResult
                answers[key] = answer = self.look(key, context)
                return found if answer is LookupResult.HIT else answer

            self._evaluate(state, most, noted)
        if LookupResult.RETRY in answers.values():
            return None
        return {key for key, answer in answers.items() if answer is LookupResult.HIT}

    def look(self, key: Any, context: Any) -> LookupResult:  # noqa: ANN401 - vLLM's OffloadKey, ReqContext
        """Return whether a page is in host memory or stored, or RETRY."""
        if self.host.lookup(key, context) is not LookupResult.MISS:
            return LookupResult.HIT
        tier = self.tier
        if not context.load_tier_filter.allows(tier.medium, tier.locality):
            return LookupResult.MISS
        found: LookupResult = tier.lookup(key, context)
        return found

    def limit_of(self, tokens: int) -> int:
        """Return the `max_load_tokens` with which vLLM loads so many tokens.

        With windows it takes one off, as the last token of a prompt is computed.
        """
        return tokens + bool(tokens and self.has_windows)

    @property
    def has_windows(self) -> bool:
        """Whether some group needs the end of a prefix alone."""
        return bool(self.scheduler._sliding_window_groups)  # noqa: SLF001 - vLLM's own

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest page: prefixes are cut at multiples of it."""
        groups = self.scheduler.config.kv_group_configs
        return max(int(group.tokens_per_chunk) for group in groups)

    def _evaluate(self, state: Any, most: int | None, look: Any) -> int | None:  # noqa: ANN401 - same
        probe = copy.copy(self.scheduler)
        probe.manager = SimpleNamespace(lookup=look)
        ignore = SimpleNamespace(
            record_lookup=lambda *_: None, record_partial_lookup=lambda *_: None
        )
        probe._events_tracker = ignore  # noqa: SLF001 - a copy's
        probe._chunks_being_loaded = None  # noqa: SLF001 - same
        found: int | None = probe._lookup(copy.copy(state), most)  # noqa: SLF001 - vLLM's own evaluator
        return found


def lower_limit(state: Any, tokens: int) -> None:  # noqa: ANN401 - vLLM's RequestOffloadState
    """Let vLLM load so many tokens of a request at most."""
    limit = state.max_load_tokens
    state.max_load_tokens = tokens if limit is None else min(limit, tokens)


def reset_limit(state: Any) -> None:  # noqa: ANN401 - same
    """Let vLLM load what the request itself allows."""
    asked = (state.req.kv_transfer_params or {}).get("max_load_tokens")
    state.max_load_tokens = asked if type(asked) is int and asked >= 0 else None
