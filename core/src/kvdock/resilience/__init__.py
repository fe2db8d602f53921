"""Deadlines, circuit breaker and bounded concurrency of one backend."""

from __future__ import annotations

from kvdock.resilience.run_within import LateError, run_within

__all__ = ["LateError", "run_within"]
