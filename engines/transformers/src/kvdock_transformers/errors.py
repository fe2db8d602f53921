"""Errors of this distribution; loads no torch."""

from kvdock import KvdockError


class UnsupportedCache(KvdockError):  # noqa: N818 - reads as what it is
    """A cache has a layer or a shape that no pool is known for."""
