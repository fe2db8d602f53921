"""Errors of this distribution; loads no torch."""

from kvdock import KvdockError


class UnsupportedCache(KvdockError):
    """A cache has a layer or a shape that no pool is known for."""


class TrialFailed(KvdockError):
    """A process of a trial ended without a result."""
