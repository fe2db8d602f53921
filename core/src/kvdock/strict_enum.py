"""Enumerations that name the nearest member when a value is unknown."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from kvdock.errors import UnknownValueError, did_you_mean


def suggest_member(value: object, kind: type[StrEnum]) -> str:
    """Return the nearest member of an enumeration, or all of them, as a hint."""
    known = [str(member) for member in kind]
    return did_you_mean(str(value), known) or f"Known are {', '.join(known)}."


class StrictEnum(StrEnum):
    """Base of the enumerations: an unknown value is rejected with the nearest."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise UnknownValueError(
            f"{value!r} is not a {cls.__name__}", fix=suggest_member(value, cls)
        )
