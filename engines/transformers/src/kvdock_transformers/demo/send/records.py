"""Records that the processes of the demo exchange; loads no torch."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs

from kvdock_transformers.families import Family, Scale


class Role(StrEnum):
    """What one of the two processes does."""

    PREFILL = "prefill"
    """Make the models, prefill, send the pages, then generate in one process."""

    DECODE = "decode"
    """Offer host memory, take the pages, generate from them."""


def _families(names: Iterable[str]) -> tuple[Family, ...]:
    return tuple(Family(name) for name in names)


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _words(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class SendJob:
    """What one of the two processes is asked to do.

    Args:
        role: Which of them.
        families: Which models, in order.
        scale: Their size.
        backend: The backend that carries the pages.
        directory: Where models, logits and what a backend keeps lie.
        salt: Keeps this trial's pages apart from all others'.
        threads: Threads that torch may use; the same in both processes, since
            bit-identical results need the same division of work.
        channel: File descriptor of the socket to the other process.
        settings: What was given for the backend.
    """

    role: Role = attrs.field(converter=Role)
    families: tuple[Family, ...] = attrs.field(converter=_families)
    scale: Scale = attrs.field(converter=Scale)
    backend: str
    directory: Path = attrs.field(converter=Path)
    salt: str
    threads: int
    channel: int
    settings: Mapping[str, object] = attrs.field(factory=dict, repr=False)


@attrs.frozen(kw_only=True)
class PoolPages:
    """The pages of one pool that a request takes.

    Args:
        pages: How many.
        nbytes: Their bytes.
    """

    pages: int
    nbytes: int


def _pools(value: Mapping[str, Any]) -> dict[str, PoolPages]:
    return {
        name: one if isinstance(one, PoolPages) else PoolPages(**one)
        for name, one in value.items()
    }


@attrs.frozen(kw_only=True)
class Generated:
    """What one process did for one model.

    Args:
        family: Which model.
        role: Which process.
        prompt_tokens: Length of the prompt.
        prefix_tokens: Its tokens that fill whole pages.
        computed_tokens: Prompt tokens that this process computed.
        prefill_s: How long computing the prompt's full pages took; 0 in the
            process that was sent them.
        send_s: From the ticket to the completion; 0 in the process that sends.
        first_token_s: From the arrival of the pages to the first token; in the
            process that sends, from its own caches.
        token_ids: The generated tokens.
        logits_path: Their logits, float32 (tokens, vocabulary), as .npy.
        proposed: Draft tokens proposed.
        accepted: Draft tokens accepted.
        pools: The pages of each pool that a decode process needs.
        arrived: The pools that arrived whole.
        arrived_bytes: Bytes that were written into slots.
    """

    family: Family = attrs.field(converter=Family)
    role: Role = attrs.field(converter=Role)
    prompt_tokens: int
    prefix_tokens: int
    computed_tokens: int
    prefill_s: float = 0.0
    send_s: float = 0.0
    first_token_s: float
    token_ids: tuple[int, ...] = attrs.field(converter=_numbers)
    logits_path: str
    proposed: int
    accepted: int
    pools: Mapping[str, PoolPages] = attrs.field(converter=_pools)
    arrived: tuple[str, ...] = attrs.field(converter=_words, default=())
    arrived_bytes: int = 0

    @property
    def acceptance(self) -> float | None:
        """Share of proposed draft tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else None
