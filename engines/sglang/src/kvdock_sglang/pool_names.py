"""The names under which SGLang registers pools.

Source: SGLang 0.5.23, `mem_cache/hicache_storage.py`: `PoolName`.
"""

from __future__ import annotations

from enum import StrEnum


class EnginePool(StrEnum):
    """Names of SGLang's pools that need special treatment."""

    KV = "kv"
    """The anchor."""
    MAMBA = "mamba"
    """Recurrent states; a page needs the last one."""
    SWA = "swa"
    """Sliding-window KV."""
    AUXILIARY_SWA = "auxiliary_swa"
    """Sliding-window KV of a second geometry."""
    DRAFT_SWA = "draft_swa"
    """Sliding-window KV of a draft model."""


WINDOWS = frozenset({EnginePool.SWA, EnginePool.AUXILIARY_SWA, EnginePool.DRAFT_SWA})
"""Pools of which the end of a prefix needs the last pages."""

_DEEPSEEK_V4 = (
    "c1",
    "c1_indexer",
    "c1_indexer_scale",
    "c2",
    "c2_indexer",
    "c2_indexer_scale",
    "c4",
    "c4_indexer",
    "c4_indexer_scale",
    "c128",
    "c4_rope",
    "c128_rope",
    "c4_state",
    "c4_indexer_state",
    "c128_state",
)

POOL_NAMES = frozenset(
    {
        "kv",
        "mamba",
        "swa",
        "auxiliary_swa",
        "indexer",
        "draft",
        "draft_indexer",
        "draft_swa",
        *(f"deepseek_v4_{name}" for name in _DEEPSEEK_V4),
    }
)
"""Every name that a route may have."""


def is_draft(name: str) -> bool:
    """Return whether the engine registers a draft model's pool by this name."""
    return name.startswith("draft")
