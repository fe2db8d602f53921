"""The demo's models and their workload, as data; loads no torch.

The command and the orchestrating process read this module, so it must stay
cheap: what needs torch lives in `model_demo.models`.
"""

from enum import StrEnum

import attrs


class Family(StrEnum):
    """One kind of attention or state, and so one set of pools."""

    MHA = "mha"
    """Grouped-query Llama target with a smaller Llama draft: kv and draft."""

    MLA = "mla"
    """DeepSeek-V3 style latent attention: one latent kv pool."""

    SWA = "swa"
    """Gemma 3 style, sliding and full layers: kv and swa."""

    MAMBA = "mamba"
    """Falcon-H1 style, attention and Mamba2 in each layer: kv and mamba."""


class Scale(StrEnum):
    """The size of the models."""

    DEMO = "demo"
    """Recomputing the prompt takes seconds on two cores."""

    TINY = "tiny"
    """Everything takes milliseconds; for tests."""


@attrs.frozen
class Workload:
    """The prompts and lengths of one trial of a model.

    `tail_tokens` follow the last full page, so that a restored run still has
    something to feed before its first token. `recompute_chunk_tokens` differs
    from `chunk_tokens` on purpose: the recomputed reference shall not share
    the warm run's rounding.
    """

    prefix_pages: int
    page_tokens: int
    chunk_tokens: int
    recompute_chunk_tokens: int
    tail_tokens: int
    new_tokens: int
    draft_tokens: int

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prompt that fill whole pages."""
        return self.prefix_pages * self.page_tokens

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.prefix_tokens + self.tail_tokens


WORKLOADS = {
    Scale.DEMO: Workload(
        prefix_pages=96,
        page_tokens=32,
        chunk_tokens=256,
        recompute_chunk_tokens=1024,
        tail_tokens=19,
        new_tokens=24,
        draft_tokens=4,
    ),
    Scale.TINY: Workload(
        prefix_pages=16,
        page_tokens=8,
        chunk_tokens=32,
        recompute_chunk_tokens=48,
        tail_tokens=5,
        new_tokens=12,
        draft_tokens=3,
    ),
}
