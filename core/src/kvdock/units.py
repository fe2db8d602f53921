"""Amounts with units: bytes and seconds, parsed and formatted."""

from __future__ import annotations

import math
import re
import sys
from types import MappingProxyType
from typing import TypeGuard, cast

from kvdock.errors import SettingsError

_POWERS = MappingProxyType({"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)
_SECONDS = MappingProxyType(
    {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h)?")


def _amount(value: object) -> TypeGuard[float]:
    """Return whether it is a number that a size or a duration can be."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= cast("float", value) <= sys.float_info.max


_MOST_BYTES = 1 << 63
"""No file and no memory has so many."""


def parse_bytes(value: str | float) -> int:
    """Read a size: a number of bytes, or text such as "64 GiB".

    K, M, G, T and P are powers of 1024 in every spelling.

    Raises:
        SettingsError: If it is not a size.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match:
            number, unit = match.groups()
            nbytes = float(number) * 2 ** _POWERS[unit.upper()]
            if nbytes < _MOST_BYTES:
                return int(nbytes)
    elif _amount(value) and value == int(value) and value < _MOST_BYTES:
        return int(value)
    raise SettingsError(
        f"{value!r} is not a size in bytes", fix='Write it like "512 MiB" or 4096.'
    )


def format_bytes(nbytes: float) -> str:
    """Write a size as `parse_bytes` reads it, rounded to a tenth."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:  # noqa: PLR2004 - the step between units
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def parse_seconds(value: str | float) -> float:
    """Read a duration: a number of seconds, or text such as "250 ms".

    Raises:
        SettingsError: If it is not a duration.
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip().lower())
        if match:
            number, unit = match.groups()
            seconds = float(number) * _SECONDS[unit or "s"]
            if seconds < math.inf:
                return seconds
    elif _amount(value):
        return float(value)
    raise SettingsError(
        f"{value!r} is not a duration", fix='Write it like "250 ms", "5 s" or 1.5.'
    )


def format_seconds(seconds: float) -> str:
    """Write a duration as `parse_seconds` reads it."""
    if 0 < seconds < 1:
        return f"{seconds * 1e3:g} ms"
    return f"{seconds:g} s"


def format_age(seconds: float) -> str:
    """Write how long ago something was, in its largest whole unit."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count > 0:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"
