"""Validators of attrs fields that name the field, and the converters before them.

Pools, deployments and manifests are validated with these, each with an error of
its own kind. Settings are not: they convert text (see `kvdock.config`).

An engine passes numpy's integers as often as Python's: `as_int` makes them
Python's own. A float, text or a bool is rejected, not converted. A converter
returns a value that it cannot read unchanged, since only a validator knows the
name of its field.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import attrs

from kvdock.strict_enum import suggest_member

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.errors import KvdockError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


def as_int(value: int) -> int:
    """Convert an integer of any library to Python's own."""
    if isinstance(value, bool):
        return value  # `operator.index` would convert it
    try:
        return operator.index(value)
    except TypeError:
        return value


def as_text(value: str) -> str:
    """Convert text of a subclass, such as a member of an enum, to Python's own.

    Messages would show it as `<PoolName.KV: 'kv'>`.
    """
    return str.__str__(value) if isinstance(cast("object", value), str) else value


def as_int_tuple(values: Iterable[int]) -> tuple[int, ...]:
    """Convert a sequence of integers of any library to a tuple of Python's."""
    try:
        return tuple(map(as_int, values))
    except TypeError:
        return values  # type: ignore[return-value]  # `int_tuple` rejects it by name


def is_int(value: object) -> TypeGuard[int]:
    """Return whether value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


@attrs.frozen
class Validators:
    """Validators that raise one kind of error."""

    error: type[KvdockError]

    def integer(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject what is not an int."""
        if not is_int(value):
            raise self.error(f"{field.name} is a whole number, not {value!r}")

    def positive(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject counts below one."""
        self._at_least(1, field, value)

    def non_negative(
        self, _: object, field: attrs.Attribute[Any], value: object
    ) -> None:
        """Reject counts below zero."""
        self._at_least(0, field, value)

    def _at_least(self, least: int, field: attrs.Attribute[Any], value: object) -> None:
        self.integer(None, field, value)
        if is_int(value) and value < least:
            raise self.error(f"{field.name} must be at least {least}, not {value}")

    def int_tuple(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject what is not a tuple of ints."""
        if not isinstance(value, tuple) or not all(map(is_int, value)):
            raise self.error(f"{field.name} is a row of whole numbers, not {value!r}")

    def boolean(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject what is not a bool: "no" would be true."""
        if not isinstance(value, bool):
            raise self.error(f"{field.name} is true or false, not {value!r}")

    def seconds(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject what is not a finite number from 0."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= cast("float", value) < math.inf:
            raise self.error(f"{field.name} is seconds from 0, not {value!r}")

    def text(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject what is not a str."""
        if not isinstance(value, str):
            raise self.error(f"{field.name} is text, not {value!r}")

    def identifier(self, _: object, field: attrs.Attribute[Any], value: object) -> None:
        """Reject names that could not be part of a key."""
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self.error(
                f"{field.name} {value!r} is not a valid name",
                fix="Use a-z, 0-9 and _, beginning with a letter, 48 characters at "
                "most.",
            )

    def members(
        self, kind: type[StrEnum]
    ) -> Callable[[object, attrs.Attribute[Any], object], None]:
        """Make a validator for a member, or a frozenset of members, of an enum."""

        def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
            for one in value if isinstance(value, frozenset) else (value,):
                if not isinstance(one, kind):
                    raise self.error(
                        f"{field.name}: {one!r} is not a {kind.__name__}",
                        fix=suggest_member(one, kind),
                    )

        return check
