"""A causal language model whose cache goes to pages and comes back."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvdock import PoolSpec
from kvdock_transformers.errors import UnsupportedCache
from kvdock_transformers.pages import (
    HostPages,
    put_state,
    put_tokens,
    put_window,
    take_state,
    take_tokens,
)
from kvdock_transformers.pools import describe


class Running(NamedTuple):
    """A model and the cache that it is working with."""

    model: PreTrainedModel
    cache: Cache

    @property
    def tokens(self) -> int:
        """Tokens that the cache has seen."""
        return self.cache.get_seq_length()


def feed(running: Running, token_ids: Sequence[int], keep: int = 1) -> torch.Tensor:
    """Run tokens through a model and return the logits of the last `keep`."""
    with torch.no_grad():
        output = running.model(
            input_ids=torch.tensor([list(token_ids)]),
            past_key_values=running.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    logits: torch.Tensor = output.logits[0]
    return logits


class PagedModel:
    """One model working on one prompt, with host pages for each of its pools.

    Page i of the prompt lies in slot i of attention and sliding pools. States
    are kept only where a prefill chunk ends, so their pool has a slot of its
    own numbering per chunk.

    Args:
        model: The model, in evaluation mode.
        prompt: Token ids.
        page_tokens: Tokens per page.
        chunk_tokens: Tokens per prefill chunk while pages are kept; a multiple
            of `page_tokens`, and no more than a sliding layer keeps.
        draft: Whether this is a draft model.

    Raises:
        UnsupportedCache: If chunks do not end where pages do, or nothing is
            known about a layer's cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Sequence[int],
        page_tokens: int,
        chunk_tokens: int,
        *,
        draft: bool = False,
    ) -> None:
        if chunk_tokens % page_tokens:
            raise UnsupportedCache(
                f"chunks of {chunk_tokens} tokens do not end where pages of "
                f"{page_tokens} do",
                fix="Choose a multiple.",
            )
        self.model = model
        self.prompt = prompt
        self.page_tokens = page_tokens
        self.chunk_tokens = chunk_tokens
        self.prefix_pages = len(prompt) // page_tokens
        self.cache = self._new_cache()
        feed(self.running, prompt[:1])
        latent = getattr(model.config, "kv_lora_rank", None)
        self.pools = describe(
            self.cache,
            page_tokens,
            draft=draft,
            latent=latent is not None and self._caches_rows_of(latent),
        )
        self.hosts: dict[str, HostPages] = {
            pool.name: HostPages(pool, self._slots(pool)) for pool in self.pools.all
        }
        self.kept: dict[str, list[int]] = {}
        self.reset()

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _caches_rows_of(self, width: int) -> bool:
        """Distinguish a latent cache from expanded keys and values."""
        layer: Any = self.cache.layers[0]
        return tuple(layer.keys.shape[1::2]) == (1, width)

    def _slots(self, pool: PoolSpec) -> int:
        if self._is_state(pool):
            # Another process may have kept one behind the last whole chunk.
            return -(-self.prefix_pages * self.page_tokens // self.chunk_tokens)
        return self.prefix_pages

    def _is_state(self, pool: PoolSpec) -> bool:
        return self.pools.state is not None and pool.name == self.pools.state.name

    def reset(self) -> None:
        """Forget the cache and which pages were kept, not the host memory."""
        self.cache = self._new_cache()
        self.kept = {pool.name: [] for pool in self.pools.all}

    @property
    def running(self) -> Running:
        """The model with its present cache."""
        return Running(self.model, self.cache)

    def slots_of(self, pool: PoolSpec, pages: Sequence[int]) -> list[int]:
        """Return where pages of the prompt lie in a pool's host memory."""
        if not self._is_state(pool):
            return list(pages)
        chunk_pages = self.chunk_tokens // self.page_tokens
        return [page // chunk_pages for page in pages]

    def prefill(self, stop: int, chunk_tokens: int, *, keep: bool) -> None:
        """Compute the prompt from where the cache ends up to a token.

        Args:
            stop: Number of prompt tokens that the cache shall hold.
            chunk_tokens: Tokens per forward pass; passes end at its multiples.
            keep: Whether to copy each new page to host memory; a state, where a
                pass ends at a multiple of the model's own `chunk_tokens`.
        """
        position = self.running.tokens
        while position < stop:
            end = min(stop, (position // chunk_tokens + 1) * chunk_tokens)
            feed(self.running, self.prompt[position:end])
            if keep:
                pages = range(position // self.page_tokens, end // self.page_tokens)
                self._keep(pages, state=end % self.chunk_tokens == 0)
            position = end

    def _keep(self, pages: range, *, state: bool) -> None:
        """Copy pages, and the states where they are those of a page's end."""
        for pool in self.pools.all:
            host = self.hosts[pool.name]
            new = pages
            if self._is_state(pool):
                if not state:
                    continue
                new = range(pages.stop - 1, pages.stop)
            slots = self.slots_of(pool, new)
            if self._is_state(pool):
                take_state(self.cache, host, slots[0])
            else:
                take_tokens(self.cache, host, pages.start, slots)
            self.kept[pool.name].extend(new)

    def needed(self, pool: PoolSpec, pages: int) -> range:
        """Return which pages of a pool a prefix of so many pages needs."""
        return range(max(0, pages - (pool.window_pages or pages)), pages)

    def warm_up(self) -> None:
        """Run a few tokens on a cache of its own, then forget them.

        The first passes of a process load code that later ones reuse: half a
        second that no time to first token should count.
        """
        few = self.prompt[: 2 * self.page_tokens]
        scratch = Running(self.model, self._new_cache())
        feed(scratch, few)
        feed(scratch, few)
        feed(scratch, few[:1])

    def keep_needed(self) -> None:
        """Mark what the whole prefix needs as kept: it is in host memory."""
        for pool in self.pools.all:
            pages = self.needed(pool, self.prefix_pages)
            self.kept[pool.name] = [*pages]

    def clear_hosts(self) -> None:
        """Zero the host memory, so that only loading can fill it."""
        for host in self.hosts.values():
            host.buffer.zero_()

    def rebuild(self, pages: int) -> None:
        """Replace the cache by one that holds the first pages of the prompt.

        The pages that `needed` names lie in host memory.
        """
        self.reset()
        if not pages:
            return
        for pool in self.pools.all:
            host = self.hosts[pool.name]
            slots = self.slots_of(pool, self.needed(pool, pages))
            if self._is_state(pool):
                put_state(self.cache, host, slots[-1])
            elif pool.window_pages:
                put_window(
                    self.cache, host, slots, self.pools, pages * self.page_tokens
                )
            else:
                put_tokens(self.cache, host, slots)
