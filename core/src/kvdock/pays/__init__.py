"""Whether loading a prefix pays: what it costs, what computing costs, what is less."""

from kvdock.pays.curves import ComputeCurve, LoadCurve, LoadMeter
from kvdock.pays.policy import (
    LIMIT,
    Choice,
    Decision,
    LoadLimit,
    LoadPolicy,
    Prefix,
    limited_by,
)

__all__ = (
    "LIMIT",
    "Choice",
    "ComputeCurve",
    "Decision",
    "LoadCurve",
    "LoadLimit",
    "LoadMeter",
    "LoadPolicy",
    "Prefix",
    "limited_by",
)
