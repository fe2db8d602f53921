"""Records that the processes of a trial exchange; loads no torch.

A job goes to a worker as a JSON file, events come back as JSON lines, and one
of them carries a `Served` record per model.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs

from kvdock_transformers.families import Family, Scale


class Phase(StrEnum):
    """What one process of a trial does; each is a process of its own."""

    OFFLOAD = "offload"
    """Make the models, prefill into an empty store, offload, generate."""

    RESTORE = "restore"
    """Start clean, find the prefix, restore it, generate."""

    RECOMPUTE = "recompute"
    """Prefill everything without a store, generate."""

    REPAIR = "repair"
    """Like RESTORE, on a store that was damaged in between."""


def _families(names: Iterable[str]) -> tuple[Family, ...]:
    return tuple(Family(name) for name in names)


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _words(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _pairs(values: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((head, tail) for head, tail in values)


@attrs.frozen(kw_only=True)
class Job:
    """What a worker process is asked to do.

    Args:
        phase: Which part of the trial.
        families: Which models, in order.
        scale: Their size.
        backend: The preferred backend, or "" for the router's own choice.
        directory: Where models, stores and logits lie.
        salt: Keeps this trial's pages apart from all others'.
        threads: Threads that torch may use; the same in all processes, since
            bit-identical results need the same division of work.
        settings: What was given for the preferred backend.
    """

    phase: Phase = attrs.field(converter=Phase)
    families: tuple[Family, ...] = attrs.field(converter=_families)
    scale: Scale = attrs.field(converter=Scale)
    backend: str
    directory: Path = attrs.field(converter=Path)
    salt: str
    threads: int
    settings: Mapping[str, object] = attrs.field(factory=dict, repr=False)

    @property
    def given(self) -> Mapping[str, Mapping[str, object]]:
        """Settings by backend."""
        return {self.backend: self.settings} if self.backend else {}


@attrs.frozen(kw_only=True)
class PoolRecord:
    """One pool, as far as the orchestrating process needs to know it.

    Args:
        stored: Page numbers that were stored, ascending.
        stored_bytes: Their bytes.
        loaded_pages: How many pages were loaded.
        loaded_bytes: Their bytes.
        window_pages: How many trailing pages a prefix needs; 0 for all.
        draft: Whether it belongs to the draft.
        page_bytes: Bytes of a page.
        ends: The first and the last bytes of each stored page, in hex, in the
            order of `stored`: by them its place on disk can be found.
        backend: Who keeps them.
        keys: The key of the first object of each stored page.
        object_bytes: Bytes of that object, as the backend keeps it.
    """

    stored: tuple[int, ...] = attrs.field(converter=_numbers)
    stored_bytes: int
    loaded_pages: int
    loaded_bytes: int
    window_pages: int
    draft: bool
    page_bytes: int
    ends: tuple[tuple[str, str], ...] = attrs.field(converter=_pairs, repr=False)
    backend: str = ""
    keys: tuple[str, ...] = attrs.field(converter=_words, default=(), repr=False)
    object_bytes: int = 0


@attrs.frozen(kw_only=True)
class Altered:
    """What became of a generation when one pool's stored pages were altered.

    Args:
        pool: The pool.
        draft: Whether it belongs to the draft.
        max_abs_diff: Largest difference of logits from the true run.
        tokens_identical: Whether the tokens stayed the same.
        proposed: Draft tokens proposed; 0 without a draft.
        accepted: Draft tokens accepted.
    """

    pool: str
    draft: bool
    max_abs_diff: float
    tokens_identical: bool
    proposed: int
    accepted: int


def _pools(value: Mapping[str, Any]) -> dict[str, PoolRecord]:
    return {
        name: record if isinstance(record, PoolRecord) else PoolRecord(**record)
        for name, record in value.items()
    }


def _altered(value: Any) -> tuple[Altered, ...]:  # noqa: ANN401 - records or their JSON
    return tuple(
        record if isinstance(record, Altered) else Altered(**record) for record in value
    )


@attrs.frozen(kw_only=True)
class Served:
    """What one process did for one model.

    Args:
        family: Which model.
        prompt_tokens: Length of the prompt.
        page_tokens: Tokens per page.
        found_pages: Longest restorable prefix at the first lookup.
        loaded_pages: Pages of the prefix that the target went on from.
        draft_loaded_pages: The same for the draft.
        computed_tokens: Prompt tokens that the target computed.
        ttft_s: From the lookup to the first token.
        token_ids: The generated tokens.
        logits_path: Their logits, float32 (tokens, vocabulary), as .npy.
        proposed: Draft tokens proposed.
        accepted: Draft tokens accepted.
        found_after: Longest restorable prefix once missing pages were stored.
        pools: The pools.
        altered: Runs on altered pages, where the phase has any.
    """

    family: Family = attrs.field(converter=Family)
    prompt_tokens: int
    page_tokens: int
    found_pages: int
    loaded_pages: int
    draft_loaded_pages: int
    computed_tokens: int
    ttft_s: float
    token_ids: tuple[int, ...] = attrs.field(converter=_numbers)
    logits_path: str
    proposed: int
    accepted: int
    found_after: int
    pools: Mapping[str, PoolRecord] = attrs.field(converter=_pools)
    altered: tuple[Altered, ...] = attrs.field(converter=_altered, default=())

    @property
    def acceptance(self) -> float | None:
        """Share of proposed draft tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else None


def to_json(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Turn a record into what `json` can write."""
    return attrs.asdict(
        record,
        value_serializer=lambda _owner, _field, value: (
            str(value) if isinstance(value, Path) else value
        ),
    )
