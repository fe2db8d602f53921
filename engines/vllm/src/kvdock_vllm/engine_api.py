"""What this package uses of vLLM, and which versions have it."""

from __future__ import annotations

TESTED = ("0.32.0",)
"""Versions that the tests run."""
