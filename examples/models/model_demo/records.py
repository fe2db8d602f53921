"""Records that the processes of a demo exchange; loads no torch.

A job goes to a process as a JSON file, events come back as JSON lines, and one of
them carries a `Served` record per model.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import cattrs

from kvdock import KvdockError
from model_demo.families import Family, Scale

WIRE = cattrs.Converter()
"""Turns records into plain data, and back."""


class Role(StrEnum):
    """The role of one process of a demo."""

    OFFLOAD = "offload"
    """Make the models, prefill into an empty store, offload, generate."""

    RESTORE = "restore"
    """Start clean, find the prefix, restore it, generate."""

    RECOMPUTE = "recompute"
    """Prefill everything without a store, generate."""

    REPAIR = "repair"
    """Like RESTORE, on a store that was damaged in between."""

    PREFILL = "prefill"
    """Make the models, prefill, send the pages, then generate in one process."""

    DECODE = "decode"
    """Offer host memory, take the pages, generate from them."""


STORING = (Role.OFFLOAD, Role.RESTORE, Role.RECOMPUTE, Role.REPAIR)
"""The processes of the demo of stored pages, one after another."""

SENDING = (Role.PREFILL, Role.DECODE)
"""The processes of the demo that sends, beside each other."""


class TrialFailed(KvdockError):  # noqa: N818 - reads as what it is
    """A process of a trial ended without a result."""


@attrs.frozen(kw_only=True)
class Job:
    """The orders of a process.

    Args:
        role: Which part of the demo.
        families: Which models, in order.
        scale: Their size.
        backend: The backend that keeps or carries the pages.
        directory: Where models, stores and logits lie.
        salt: Keeps this trial's pages apart from all others'.
        threads: Threads that torch may use; the same in all processes, since
            bit-identical results need the same division of work.
        settings: What was given for the backend.
        channel: File descriptor of the connection to a process beside it; -1
            without one.
    """

    role: Role
    families: tuple[Family, ...]
    scale: Scale
    backend: str
    directory: Path
    salt: str
    threads: int
    settings: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    channel: int = -1

    @property
    def given(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings by backend."""
        return {self.backend: self.settings}


@attrs.frozen(kw_only=True)
class PoolRecord:
    """One pool, as far as the orchestrating process needs to know it.

    Args:
        loaded_pages: How many pages were loaded, or are to be sent.
        page_bytes: Bytes of a page.
        stored: Page numbers that were stored, ascending.
        window_pages: How many trailing pages a prefix needs; 0 for all.
        draft: Whether it belongs to the draft.
        backend: Who keeps them.
        keys: The key of the first object of each stored page.
        object_bytes: Bytes of that object, as the backend keeps it.
    """

    loaded_pages: int
    page_bytes: int
    stored: tuple[int, ...] = ()
    window_pages: int = 0
    draft: bool = False
    backend: str = ""
    keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    object_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored pages."""
        return len(self.stored) * self.page_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the loaded pages."""
        return self.loaded_pages * self.page_bytes


@attrs.frozen(kw_only=True)
class Altered:
    """The result of a generation after one pool's stored pages were altered.

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


@attrs.frozen(kw_only=True)
class Served:
    """The results of one process for one model.

    Args:
        family: Which model.
        prompt_tokens: Length of the prompt.
        page_tokens: Tokens per page.
        computed_tokens: Prompt tokens that the target computed.
        ttft_s: To the first token, from the lookup or the arrival of the pages; in
            the process that sends, from its own caches.
        token_ids: The generated tokens.
        logits_path: Their logits, float32 (tokens, vocabulary), as .npy.
        proposed: Draft tokens proposed.
        accepted: Draft tokens accepted.
        pools: The pools.
        found_pages: Longest restorable prefix at the first lookup.
        loaded_pages: Pages of the prefix that the target went on from.
        draft_loaded_pages: The same for the draft.
        found_after: Longest restorable prefix once missing pages were stored.
        altered: Runs on altered pages, where the role has any.
        prefill_s: How long computing the full pages took the process that sends.
        send_s: From the ticket to the completion, in the process that is sent them.
        arrived: The pools that arrived whole.
        arrived_bytes: Bytes that were written into slots.
    """

    family: Family
    prompt_tokens: int
    page_tokens: int
    computed_tokens: int
    ttft_s: float
    token_ids: tuple[int, ...]
    logits_path: str
    proposed: int
    accepted: int
    pools: Mapping[str, PoolRecord]
    found_pages: int = 0
    loaded_pages: int = 0
    draft_loaded_pages: int = 0
    found_after: int = 0
    altered: tuple[Altered, ...] = ()
    prefill_s: float = 0.0
    send_s: float = 0.0
    arrived: tuple[str, ...] = ()
    arrived_bytes: int = 0

    @property
    def prefix_pages(self) -> int:
        """Pages of the prompt that are full."""
        return (self.prompt_tokens - 1) // self.page_tokens

    @property
    def acceptance(self) -> float | None:
        """Share of proposed draft tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else None


Runs = Mapping[Role, Mapping[Family, Served]]
"""What each process has made of each model."""
