"""The policies of eviction, by name; settings load it without numpy."""

from __future__ import annotations

from kvdock.strict_enum import StrictEnum


class EvictionPolicy(StrictEnum):
    """Which pages make way for new ones."""

    REUSE = "reuse"
    """Those that bring the fewest uses for the room they take, as learned from the
    times after which pages were used again. Resists scans and bursts."""
    LRU = "lru"
    """Those that were used the longest time ago."""
