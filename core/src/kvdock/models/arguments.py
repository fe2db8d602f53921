"""From the values of a table to the arguments of a constructor.

A file or a command line knows no types: "no" is true to Python, 8.0 a number
and a misspelled field silence. So each value is held against the annotation
of what it is for, and refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import attrs

from kvdock.errors import KvdockError, PoolError, nearest
from kvdock.pools.validators import is_whole
from kvdock.pools.enums import Word


@attrs.frozen
class _Wanted:
    """What a constructor takes: field to type, and what it cannot do without."""

    types: Mapping[str, Any]
    required: frozenset[str]


def arguments(
    where: str,
    constructor: Callable[..., object],
    given: Mapping[str, object],
    *,
    besides: Collection[str],
) -> dict[str, Any]:
    """Read a table as keywords of a constructor.

    Args:
        where: Whose table it is, for messages.
        constructor: A function with keywords and types, the last of them
            perhaps an unpacked `TypedDict`.
        given: The table.
        besides: Arguments that come from elsewhere.

    Raises:
        PoolError: On a field that is unknown, missing or of the wrong type.
    """
    wanted = _wanted(constructor)
    known = [name for name in wanted.types if name not in besides]
    for name in given:
        if name not in known:
            raise PoolError(
                f"{where}: unknown field {name!r}",
                fix=nearest(name, known) or f"Known are {', '.join(known)}.",
            )
    for name in known:
        if name in wanted.required and name not in given:
            raise PoolError(f"{where}: field {name!r} is missing")
    return {
        name: _read(f"{where}: {name}", value, wanted.types[name])
        for name, value in given.items()
    }


def _wanted(constructor: Callable[..., object]) -> _Wanted:
    hints = get_type_hints(constructor)
    types: dict[str, Any] = {}
    required: set[str] = set()
    for name, one in inspect.signature(constructor).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            (options,) = get_args(hints[name])
            types |= get_type_hints(options)
            required |= options.__required_keys__
        else:
            types[name] = hints[name]
            if one.default is one.empty:
                required.add(name)
    return _Wanted(types, frozenset(required))


def _read(where: str, value: object, wanted: Any) -> object:  # noqa: ANN401 - any annotation
    if inspect.isclass(wanted) and issubclass(wanted, Word):
        try:
            return wanted(value)  # type: ignore[arg-type]  # a word refuses what is none
        except KvdockError as error:
            raise PoolError(f"{where}: {error.what}", fix=error.fix) from error
    for kind, (fits, what) in _PLAIN.items():
        if wanted == kind:
            if not fits(value):
                raise PoolError(f"{where} is {what}, not {value!r}")
            return value
    return _shapes(where, value) if wanted == _SHAPES else _shape(where, value)


def _shape(where: str, value: object) -> tuple[int, ...]:
    """Read a shape; one number is a shape of one axis."""
    extents = value if isinstance(value, list | tuple) else [value]
    if not all(map(is_whole, extents)):
        raise PoolError(f"{where} is a shape of whole numbers, not {value!r}")
    return tuple(extents)


def _shapes(where: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Read a list of shapes; one shape is a list of one."""
    if isinstance(value, list | tuple) and not any(map(is_whole, value)):
        return tuple(_shape(where, one) for one in value)
    return (_shape(where, value),)


_SHAPES = Sequence[Sequence[int]]
_PLAIN: Mapping[Any, tuple[Callable[[object], bool], str]] = MappingProxyType(
    {
        bool: (lambda value: isinstance(value, bool), "true or false"),
        int: (is_whole, "a whole number"),
        str: (lambda value: isinstance(value, str), "text"),
        str | None: (lambda value: isinstance(value, str), "text"),
    }
)
