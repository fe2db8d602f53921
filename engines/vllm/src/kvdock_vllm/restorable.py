"""Check that what vLLM stores of each group can ever be restored.

vLLM stores what its own prefix cache would look for, and its connector looks for
what it counts itself. Where the two differ, a cache stores and never hits. So
prompts of several lengths are tried before the first request: with vLLM's own choice
of what to store, and its own lookup.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvdock.errors import SettingsError
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock_vllm.rows import Group

log = logging.getLogger("kvdock.vllm")

_PROMPTS = (2, 3, 5)
"""Lengths of prompts that are tried, in windows or chunks of the largest group."""

_CHUNKS_TRIED = 16


def check_states(groups: Sequence[Group], blocks_per_chunk: int) -> None:
    """Reject pages of several blocks for groups that keep one state.

    Raises:
        SettingsError: With what to change.
    """
    states = [one for one in groups if one.spec_class == "MambaSpec"]
    if states and blocks_per_chunk > 1:
        tokens = states[0].tokens // blocks_per_chunk
        raise SettingsError(
            f"blocks_per_chunk is {blocks_per_chunk}, and this model has layers with "
            "one state a block: vLLM stores states at ends of blocks, and none would "
            "ever be restored",
            fix="Leave blocks_per_chunk out; larger pages come with a larger "
            f"--mamba-block-size (now {tokens}) and --block-size.",
        )


def check_rows(
    groups: Sequence[Any], rows: int, row_bytes: int, step_tokens: int
) -> None:
    """Reject host memory that cannot take what one step stores.

    vLLM stores all pages of a request's step, or none, and tries again with more. One
    step computes `step_tokens` of a request at most.

    Raises:
        SettingsError: With the least that does.
    """
    wanted = sum(
        -(-step_tokens // one.tokens_per_chunk)
        if one.sliding_window_size_in_chunks is None
        else 1
        for one in groups
    )
    if rows < wanted:
        raise SettingsError(
            f"host_memory has {rows} rows, and a step of {step_tokens} tokens stores "
            f"{wanted}: vLLM would store nothing of a long prompt, and load no more "
            "of one than those rows hold",
            fix=f"Give at least {format_bytes(wanted * row_bytes)}, and room for "
            "several prompts, or lower --max-num-batched-tokens.",
        )


def loadable_tokens(groups: Sequence[Any], rows: int) -> int:
    """Return how long a prefix is that so many rows can hold; 0 for any length.

    A group with a window takes a row for each page of it, and one more.
    """
    windows = [one.sliding_window_size_in_chunks for one in groups]
    rows -= sum(window + 1 for window in windows if window is not None)
    full = [
        one.tokens_per_chunk
        for one, window in zip(groups, windows, strict=True)
        if window is None
    ]
    if not full:
        return 0
    largest = max(full)
    each = sum(largest // tokens for tokens in full)
    return int(max(0, rows // each * largest))


def host_memory_words(groups: Sequence[Any], rows: int) -> str:
    """Say which prefix host memory can take from storage at once."""
    tokens = loadable_tokens(groups, rows)
    windows = any(group.sliding_window_size_in_chunks is not None for group in groups)
    limit = "if a window or state that ends there is stored, " if windows else ""
    return f"host memory has {rows} rows: " + (
        f"a request loads the first {tokens} tokens of its prefix at most, {limit}and "
        "computes the rest"
        if tokens
        else "enough for prefixes of any length, as only their windows are loaded"
    )


def unrestorable(scheduler: Any) -> str:  # noqa: ANN401 - same
    """Return why no long prompt would ever be restored, with what to change; or "".

    The scheduler is copied, and not changed.
    """
    try:
        if _is_restored(scheduler, range(len(scheduler.config.kv_group_configs))):
            return ""
        guilty = [
            number
            for number, _ in enumerate(scheduler.config.kv_group_configs)
            if not _is_restored(scheduler, [number])
        ]
    except (AttributeError, TypeError) as error:
        # Names of vLLM's own, which a release may change.
        log.debug("whether pages can be restored is not known: %s", error)
        return ""
    return "; ".join(_reason(scheduler.config, number) for number in guilty) or (
        "no length of a prompt fits all KV cache groups at once"
    )


def _reason(config: Any, number: int) -> str:  # noqa: ANN401 - vLLM's SchedulerOffloadConfig
    group = config.kv_group_configs[number]
    spec = group.kv_cache_spec
    window = getattr(spec, "sliding_window", None)
    said = f"pages of KV cache group {group.group_idx} ({type(spec).__name__})"
    if window is None:
        return f"{said} are stored where no lookup asks for them"
    return (
        window_reason(said, window, group.tokens_per_block, config.blocks_per_chunk)
        or f"{said}: prompts longer than the window are never restored"
    )


def window_reason(said: str, window: int, block_tokens: int, blocks: int) -> str:
    """Return why a sliding window would never be restored; or "".

    vLLM looks for one more page than it keeps where a window begins with a page.
    """
    kept, over = divmod(window - 1, block_tokens * blocks)
    if over:
        return ""
    fits = [n for n in range(1, _CHUNKS_TRIED) if (window - 1) % (n * block_tokens)]
    fix = f'set "blocks_per_chunk": {fits[0]}' if fits else "use another --block-size"
    return (
        f"{said}: vLLM keeps {kept} of a window of {window} tokens and asks for "
        f"{kept + 1}, so prompts longer than the window are never restored; {fix}"
    )


def _is_restored(scheduler: Any, numbers: Sequence[int]) -> bool:  # noqa: ANN401 - same
    """Return whether a long prompt would be, if only some groups were as stored."""
    groups = scheduler.config.kv_group_configs
    long = max(
        max(
            one.tokens_per_chunk,
            one.tokens_per_chunk * (one.sliding_window_size_in_chunks or 0),
            scheduler.config.alignment_tokens or 0,
        )
        for one in groups
    )
    return any(
        _restored_tokens(scheduler, numbers, times * long + more) > 0
        for times in _PROMPTS
        for more in (1, long // 2 + 1, long)
    )


def _restored_tokens(scheduler: Any, numbers: Sequence[int], tokens: int) -> int:  # noqa: ANN401 - same
    """Return how much of a prompt vLLM would restore that it has stored itself."""
    from vllm.v1.kv_offload.base import LookupResult  # noqa: PLC0415 - the engine

    config = scheduler.config
    keys: list[list[tuple[int, int]]] = []
    stored: set[tuple[int, int]] = set()
    for number, group in enumerate(config.kv_group_configs):
        count = tokens // group.tokens_per_chunk
        mine = [(number, chunk) for chunk in range(count)]
        keys.append(mine)
        mask = None
        if number in numbers:
            mask = _stored(scheduler, group, count, tokens)
        stored.update(mine if mask is None else (mine[at] for at in mask))
    probe = copy.copy(scheduler)
    probe.manager = SimpleNamespace(
        lookup=lambda key, _: LookupResult.HIT if key in stored else LookupResult.MISS
    )
    probe._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)  # noqa: SLF001 - a copy's
    probe._chunks_being_loaded = None  # noqa: SLF001 - same
    state = SimpleNamespace(
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        req=SimpleNamespace(num_tokens=tokens, request_id="tried"),
        req_context=None,
        group_states=tuple(SimpleNamespace(offload_keys=mine) for mine in keys),
    )
    return int(probe._lookup_complete_chunks(state) or 0)  # noqa: SLF001 - vLLM's own evaluator


def _stored(scheduler: Any, group: Any, count: int, tokens: int) -> list[int] | None:  # noqa: ANN401 - same
    """Return which chunks of a prompt vLLM stores; None for all."""
    config = scheduler.config
    if group.requires_cow_source:
        # States are handed over where the scheduler cuts, at ends of chunks.
        return None
    sparse = config.retention_interval is not None
    mask = scheduler._reachable_store_block_mask(  # noqa: SLF001 - vLLM's own choice
        group_config=group,
        start_chunk_idx=0,
        end_chunk_idx=count,
        final_segment_end_chunk_idx=None if sparse or group.is_eagle_group else count,
        reachable_boundaries=(tokens - 1,) if sparse else (),
    )
    if mask is None:
        return None
    per = config.blocks_per_chunk
    return [at for at in range(count) if any(mask[at * per : (at + 1) * per])]
