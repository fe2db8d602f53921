"""Whether loading a prefix pays: what it costs, what computing costs, what is less."""

from kvdock.pays.curves import LoadCurve
from kvdock.pays.policy import (
    LIMIT,
    Decision,
    LoadLimit,
    LoadPolicy,
    Prefix,
    limited_by,
)

__all__ = (
    "LIMIT",
    "Decision",
    "LoadCurve",
    "LoadLimit",
    "LoadPolicy",
    "Prefix",
    "limited_by",
)
