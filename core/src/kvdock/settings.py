"""Settings as attrs classes: a mapping becomes one, or is refused by name.

A mapping of settings exists only where an engine or the command line hands it
over. From there on a plugin sees an instance of the class that it declares.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    TypeGuard,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import attrs

from kvdock.errors import SettingsError, nearest

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")

_POWERS = MappingProxyType({"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", re.IGNORECASE)
_SECONDS = MappingProxyType(
    {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|min|h)?")
_BOOLS = MappingProxyType(
    {"1": True, "true": True, "yes": True, "on": True}
    | {
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
)


def _amount(value: object) -> TypeGuard[float]:
    """Return whether it is a number that a size or a duration can be."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= cast("float", value) <= sys.float_info.max


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
            if nbytes < math.inf:
                return int(nbytes)
    elif _amount(value) and value == int(value):
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


def size(default: int, *, help: str) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is a size in bytes."""
    return attrs.field(
        default=default, converter=parse_bytes, metadata={"help": help, "unit": "bytes"}
    )


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


def duration(default: str, *, help: str, least: str = "0 s") -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is a duration in seconds, `least` or more."""
    least_s = parse_seconds(least)

    def enough(_: object, field: attrs.Attribute[float], value: float) -> None:
        if value < least_s:
            raise SettingsError(
                f"{field.name} must be at least {format_seconds(least_s)}, not "
                f"{format_seconds(value)}"
            )

    return attrs.field(
        default=parse_seconds(default),
        converter=parse_seconds,
        validator=enough,
        metadata={"help": help, "unit": "seconds"},
    )


def count(default: int, *, help: str, least: int = 0) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is a number of things, `least` or more."""

    def enough(_: object, field: attrs.Attribute[int], value: int) -> None:
        if value < least:
            raise SettingsError(f"{field.name} must be at least {least}, not {value}")

    return attrs.field(default=default, validator=enough, metadata={"help": help})


def secret(default: object = attrs.NOTHING, *, help: str) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is never shown: a password, a token."""
    return attrs.field(
        default=default, repr=False, metadata={"help": help, "secret": True}
    )


def option(default: object = attrs.NOTHING, *, help: str) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting of any other type."""
    return attrs.field(default=default, metadata={"help": help})


def choice(default: StrEnum, *, help: str) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is one of the words of the default's list.

    Other words are refused wherever the setting comes from, code included.
    """
    kind = type(default)

    def known(value: object, field: attrs.Attribute[StrEnum]) -> StrEnum:
        try:
            return _to_word(value, kind)
        except SettingsError as error:
            raise SettingsError(f"{field.name}: {error.what}", fix=error.fix) from None

    return attrs.field(
        default=default,
        converter=attrs.Converter(known, takes_field=True),
        metadata={"help": help},
    )


def structure(cls: type[T], given: Mapping[str, object], *, where: str) -> T:
    """Build a settings class from a mapping.

    Args:
        cls: An attrs class.
        given: Setting names and values; text is read as what is wanted.
        where: Whose settings these are, for messages.

    Raises:
        SettingsError: On an unknown key (with the nearest known one), a
            missing one, or a value of the wrong kind.
    """
    check_keys(cls, given, where=where)
    from cattrs import transform_error  # noqa: PLC0415 - 40 ms that a listing saves

    try:
        return _converter().structure(dict(given), cls)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error.what}", fix=error.fix) from error
    except Exception as error:
        reasons = transform_error(error, path=where, format_exception=_reason)
        raise SettingsError("; ".join(reasons)) from error


def check_keys(cls: type, given: Mapping[str, object], *, where: str) -> None:
    """Refuse settings that a class, or a group in it, does not know or lacks.

    Raises:
        SettingsError: On an unknown key, with the nearest known one, and on
            one that is missing.
    """
    fields = fields_of(cls)
    for key, value in given.items():
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise SettingsError(
                f"{where}: unknown setting {key!r}",
                fix=nearest(key, fields) or f"Known settings: {known}.",
            )
        group = fields[key].type
        if isinstance(group, type) and attrs.has(group):
            if not isinstance(value, Mapping):
                raise SettingsError(f"{where}: {key!r} is a group of settings")
            check_keys(group, value, where=f"{where}, {key}")
    for name, field in fields.items():
        if field.default is attrs.NOTHING and name not in given:
            raise SettingsError(f"{where}: setting {name!r} is missing")


def fields_of(cls: type) -> dict[str, attrs.Attribute[Any]]:
    """Return the fields of a settings class by name, their types resolved."""
    attrs.resolve_types(cls)
    return {field.name: field for field in attrs.fields(cls)}


def _reason(error: BaseException, wanted: type | None) -> str:
    from cattrs.v import format_exception  # noqa: PLC0415 - as above

    if isinstance(error, SettingsError | ValueError):
        return str(error).rstrip(".")
    return format_exception(error, wanted)


def _converter() -> Converter:
    from cattrs import Converter  # noqa: PLC0415 - 40 ms that a listing saves

    converter = Converter(prefer_attrib_converters=True)
    # cattrs calls the type itself: bool("no") is true and int(2.7) is 2.
    converter.register_structure_hook(bool, _to_bool)
    converter.register_structure_hook(int, _to_int)
    converter.register_structure_hook(str, _to_str)
    converter.register_structure_hook(Path, _to_path)
    # A StrEnum is a str as well, and would be taken for plain text.
    converter.register_structure_hook(StrEnum, _to_word)
    converter.register_structure_hook_func(
        lambda kind: cast("object", get_origin(kind)) is tuple,
        lambda value, kind: _to_words(converter, value, kind),
    )
    return converter


def _to_path(value: object, _: type) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise SettingsError(f"{value!r} is no path", fix="Write it as text.")
    # No shell is in between where a file or an engine gives it.
    return Path(value).expanduser()


def _to_words(converter: Converter, value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type's own arguments
    """Read a list, or text with commas, as the environment has it."""
    if isinstance(value, str):
        value = [word for word in map(str.strip, value.split(",")) if word]
    if not isinstance(value, list | tuple):
        raise SettingsError(f"{value!r} is no list")
    of, *_ = get_args(kind)
    return tuple(converter.structure(one, of) for one in value)


def _to_word(value: object, kind: type[StrEnum]) -> StrEnum:
    words = [str(word) for word in kind]
    if str(value) in words:
        return kind(str(value))
    hint = nearest(str(value), words) or f"Known words: {', '.join(words)}."
    raise SettingsError(f"{value!r} is not known", fix=hint)


def _to_bool(value: object, _: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if isinstance(value, str) and word in _BOOLS:
        return _BOOLS[word]
    raise ValueError(f"{value!r} is neither true nor false")


def _to_int(value: object, _: object) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _to_str(value: object, _: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not text")
