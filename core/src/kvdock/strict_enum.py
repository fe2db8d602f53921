"""Enumerations that name the nearest member when a value is unknown."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from kvdock.errors import UnknownValueError, did_you_mean


class StrictEnum(StrEnum):
    """Base of the closed lists: a wrong word is refused with the nearest."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        known = [member.value for member in cls]
        raise UnknownValueError(
            f"{value!r} is not a {cls.__name__}",
            fix=did_you_mean(str(value), known) or f"Known are {', '.join(known)}.",
        )
