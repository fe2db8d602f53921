"""Taking a cache apart into pages in host memory, and putting it back.

All copies are exact: the same bits come back, in tensors of the same shape, so
a model that goes on from a rebuilt cache computes what it would have computed.
Caches hold one sequence (batch size 1).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from kvdock import PoolSpec, Region, Shard
from kvdock.config import KEPT_FREE_BYTES
from kvdock.models import HostBudget
from kvdock.pools import Per
from kvdock_transformers.errors import UnsupportedCache
from kvdock_transformers.pools import DTYPES, CachePools, state_part_names

_TORCH = {stored: own for own, stored in DTYPES.items()}


class HostPages:
    """Host memory for the pages of one pool, a page in one run of bytes.

    Args:
        spec: The pool, in layout PAGE_OBJECT.
        pages: How many pages there is room for.

    Raises:
        PoolError: If the host has too little memory left for them.
    """

    def __init__(self, spec: PoolSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self.page_bytes = spec.page_bytes(Shard())
        HostBudget.measure(KEPT_FREE_BYTES).check(
            [(spec.name, pages * self.page_bytes)]
        )
        self.buffer = torch.zeros((pages, self.page_bytes), dtype=torch.uint8)

    def region(self) -> Region:
        """Describe this memory for an attachment."""
        return Region.of(self.spec, Shard(), (self.buffer,), self.pages)

    def parts(self) -> dict[str, torch.Tensor]:
        """Return typed views of the parts.

        Returns:
            Per part a tensor (pages, layers, tokens, *shape), or (pages,
            layers, *shape) for a part that is counted per page.
        """
        views = {}
        start = 0
        for part in self.spec.parts:
            axes = [len(self.spec.layers), *part.shape]
            if part.per is Per.TOKEN:
                axes.insert(1, self.spec.page_tokens)
            nbytes = len(self.spec.layers) * self.spec.part_bytes(part, Shard())
            piece = self.buffer[:, start : start + nbytes].view(_TORCH[part.dtype])
            views[part.name] = piece.view(self.pages, *axes)
            start += nbytes
        return views


def take_tokens(
    cache: Cache, host: HostPages, first_page: int, slots: Sequence[int]
) -> None:
    """Copy whole pages of attention layers into host memory.

    The layers must still hold the pages' tokens. Page `first_page` + i of the sequence
    goes to `slots[i]`.
    """
    if not slots:
        return
    tokens = host.spec.page_tokens
    start, count = first_page * tokens, len(slots) * tokens
    first, second = host.parts().values()
    for position, number in enumerate(host.spec.layers):
        layer: Any = cache.layers[number]
        # A sliding layer holds only the last tokens of what it has seen.
        offset = start - (layer.get_seq_length() - layer.keys.shape[-2])
        if offset < 0 or offset + count > layer.keys.shape[-2]:
            message = (
                f"layer {number} no longer holds tokens {start} to {start + count}"
            )
            raise UnsupportedCache(message)
        for view, tensor in ((first, layer.keys), (second, layer.values)):
            # (heads, count, width) becomes (pages, tokens, heads, width).
            rows = (
                tensor[0, :, offset : offset + count]
                .transpose(0, 1)
                .unflatten(0, (len(slots), tokens))
            )
            view[torch.tensor(slots), position] = rows.reshape(
                len(slots), *view.shape[2:]
            )


def take_state(cache: Cache, host: HostPages, slot: int) -> None:
    """Copy the recurrent states, as they are now, into one page.

    The caller sees to it that the cache stands at a page boundary.
    """
    parts = host.parts()
    for position, number in enumerate(host.spec.layers):
        layer: Any = cache.layers[number]
        for index, (temporal, conv) in enumerate(state_part_names(layer)):
            parts[temporal][slot, position] = layer.recurrent_states[index][0]
            parts[conv][slot, position] = layer.conv_states[index][0]


def put_tokens(cache: Cache, host: HostPages, slots: Sequence[int]) -> None:
    """Put pages of a full-attention pool back, from the first token on."""
    if slots:
        _put(cache, host, slots, keep_tokens=len(slots) * host.spec.page_tokens)


def put_window(
    cache: Cache, host: HostPages, slots: Sequence[int], pools: CachePools, tokens: int
) -> None:
    """Put the last pages of a sliding-window pool back.

    They lie in `slots`, in order; `tokens` is how many the sequence has up to here.
    """
    if not slots:
        return
    _put(cache, host, slots, keep_tokens=min(pools.window_tokens, tokens))
    for number in host.spec.layers:
        layer: Any = cache.layers[number]
        # The layer counted only what it was given; masks and positions need
        # the length of the whole sequence.
        layer.cumulative_length = tokens


def put_state(cache: Cache, host: HostPages, slot: int) -> None:
    """Put the recurrent states of one page back."""
    parts = host.parts()
    for position, number in enumerate(host.spec.layers):
        for index, (temporal, conv) in enumerate(
            state_part_names(cache.layers[number])
        ):
            cache.update_conv_state(
                parts[conv][slot, position][None], number, state_idx=index
            )
            cache.update_recurrent_state(
                parts[temporal][slot, position][None], number, state_idx=index
            )


def _put(cache: Cache, host: HostPages, slots: Sequence[int], keep_tokens: int) -> None:
    chosen = torch.tensor(slots)
    views = list(host.parts().values())
    for position, number in enumerate(host.spec.layers):
        states: list[torch.Tensor] = []
        for view, part in zip(views, host.spec.parts, strict=True):
            width = part.shape[-1]
            rows = view[chosen, position].reshape(
                len(slots) * host.spec.page_tokens, -1, width
            )
            states.append(rows[-keep_tokens:].transpose(0, 1)[None].contiguous())
        first, second = states
        cache.update(first, second, number)
