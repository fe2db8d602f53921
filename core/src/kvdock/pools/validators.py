"""What the fields of descriptions take for what, and refuse by name.

An engine hands over numpy's integers as often as Python's: they are whole
numbers, and become Python's own. A float, a word or a switch is not guessed
at. Converters let pass what they cannot read, since only a validator knows
the name of its field.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from kvdock.errors import PoolError

if TYPE_CHECKING:
    import attrs

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


def as_int(value: int) -> int:
    """Take a whole number of any library for Python's own."""
    if isinstance(value, bool):
        return value  # an index would make a number of it
    try:
        return operator.index(value)
    except TypeError:
        return value


def as_int_tuple(values: Iterable[int]) -> tuple[int, ...]:
    """Take a row of whole numbers of any library for a tuple of Python's."""
    try:
        return tuple(map(as_int, values))
    except TypeError:
        return values  # type: ignore[return-value]  # `row` refuses it by name


def is_int(value: object) -> TypeGuard[int]:
    """Return whether it is a whole number; a switch is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse what is not a whole number."""
    if not is_int(value):
        raise PoolError(f"{attribute.name} is a whole number, not {value!r}")


def positive(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse counts below one."""
    integer(_, attribute, value)
    if is_int(value) and value < 1:
        raise PoolError(f"{attribute.name} must be at least 1, not {value}")


def non_negative(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse counts below zero."""
    integer(_, attribute, value)
    if is_int(value) and value < 0:
        raise PoolError(f"{attribute.name} must be at least 0, not {value}")


def int_tuple(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse what is not a row of whole numbers."""
    if not isinstance(value, tuple) or not all(map(is_int, value)):
        raise PoolError(f"{attribute.name} is a row of whole numbers, not {value!r}")


def boolean(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse what is neither true nor false: "no" would be true."""
    if not isinstance(value, bool):
        raise PoolError(f"{attribute.name} is true or false, not {value!r}")


def identifier(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    """Refuse names that could not stand in a key."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise PoolError(
            f"{attribute.name} {value!r} is not a valid name",
            fix="Use a-z, 0-9 and _, beginning with a letter, 48 characters at most.",
        )
