"""Settings as attrs classes: a mapping becomes one, or is refused by name.

A mapping of settings exists only where an engine or the command line hands it
over. From there on a plugin sees an instance of the class that it declares.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar, cast

import attrs

from kvdock.config.convert import (converter, to_word)
from kvdock.errors import SettingsError
from kvdock.config.structure import (NOTHING_GIVEN, Elsewhere, check_complete, check_known, elsewhere_of, fields_of, group_of, refusal, secrets_in)

T = TypeVar("T")

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


def _about(help: str, elsewhere: Elsewhere | None, **more: object) -> dict[str, object]:  # noqa: A002 - as attrs.field
    return {"help": help, "elsewhere": elsewhere or Elsewhere(), **more}


def option(
    default: object = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - as attrs.field
    elsewhere: Elsewhere | None = None,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting of a type that has no function of its own here."""
    return attrs.field(default=default, metadata=_about(help, elsewhere))


def secret(
    default: object = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - as attrs.field
    elsewhere: Elsewhere | None = None,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is never shown: a password, a token."""
    return attrs.field(
        default=default, repr=False, metadata=_about(help, elsewhere, secret=True)
    )


def size(default: int, *, help: str, elsewhere: Elsewhere | None = None) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare a setting that is a size in bytes."""
    return attrs.field(
        default=default,
        converter=parse_bytes,
        metadata=_about(help, elsewhere, unit="bytes"),
    )


def duration(
    default: str,
    *,
    help: str,  # noqa: A002 - as attrs.field
    least: str = "0 s",
    most: str = "",
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is a duration in seconds, within bounds."""
    return attrs.field(
        default=parse_seconds(default),
        converter=parse_seconds,
        validator=_between(
            parse_seconds(least),
            parse_seconds(most) if most else math.inf,
            format_seconds,
        ),
        metadata=_about(help, None, unit="seconds"),
    )


def count(
    default: int,
    *,
    help: str,  # noqa: A002 - as attrs.field
    least: int = 0,
    most: float = math.inf,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is a number of things, `least` to `most`."""
    return attrs.field(
        default=default,
        validator=_between(least, most, str),
        metadata=_about(help, None),
    )


def _between(
    least: float, most: float, spell: Callable[[Any], str]
) -> Callable[[object, attrs.Attribute[Any], float], None]:
    def check(_: object, field: attrs.Attribute[Any], value: float) -> None:
        if not least <= value <= most:
            low = value < least
            bound = f"at least {spell(least)}" if low else f"at most {spell(most)}"
            raise SettingsError(f"{field.name} must be {bound}, not {spell(value)}")

    return check


def choice(
    default: StrEnum,
    *,
    help: str,  # noqa: A002 - as attrs.field
    elsewhere: Elsewhere | None = None,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is one of the words of the default's list.

    Other words are refused wherever the setting comes from, code included.
    """
    kind = type(default)

    def known(value: object, field: attrs.Attribute[StrEnum]) -> StrEnum:
        try:
            return to_word(value, kind)
        except SettingsError as error:
            raise SettingsError(f"{field.name}: {error.what}", fix=error.fix) from None

    return attrs.field(
        default=default,
        converter=attrs.Converter(known, takes_field=True),
        metadata=_about(help, elsewhere),
    )


def structure(
    cls: type[T],
    given: Mapping[str, object],
    *,
    where: str,
    origins: Mapping[str, str] = NOTHING_GIVEN,
    environ: Mapping[str, str] = os.environ,
) -> T:
    """Build a settings class from a mapping.

    What is not given is taken from the variables of others that the class
    names, and then from its defaults.

    Args:
        cls: An attrs class.
        given: Setting names and values; text is read as what is wanted.
        where: Whose settings these are, for messages.
        origins: Setting, with dots, to where it comes from, for messages.
        environ: Where the variables of others are read.

    Raises:
        SettingsError: On an unknown key (with the right one, or the nearest),
            a missing one, or a value of the wrong kind.
    """
    check_known(cls, given, where=where, origins=origins)
    full, more = filled(cls, given, environ)
    check_complete(cls, full, where=where)
    try:
        return converter().structure(full, cls)
    except Exception as error:  # noqa: BLE001 - whatever a schema raises
        wrong = refusal(cls, full, where, {**origins, **more}, error)
        # The cause would show what is secret in a traceback.
        raise wrong from (None if any(secrets_in(cls, full)) else error)


def filled(
    cls: type, given: Mapping[str, object], environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, object], dict[str, str]]:
    """Take what is not given from the variables of others.

    Returns:
        All that is known of the settings, and where each comes from that was
        not given, by name with dots.

    Raises:
        SettingsError: If a variable cannot be read.
    """
    full, origins = dict(given), dict[str, str]()
    for name, field in fields_of(cls).items():
        below = given.get(name, {})
        if (group := group_of(field)) and isinstance(below, Mapping):
            more, told = filled(group, below, environ)
            if told:
                full[name] = more
                origins |= {f"{name}.{one}": of for one, of in told.items()}
            continue
        other = elsewhere_of(field)
        if name not in given and (text := environ.get(other.variable)):
            origins[name] = f"environment {other.variable}"
            try:
                full[name] = other.read(text)
            except SettingsError as error:
                what = f"{name} ({origins[name]}): {error.what}"
                raise SettingsError(what, fix=error.fix) from None
    return full, origins
