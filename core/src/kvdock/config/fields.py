"""Settings as attrs classes: a mapping becomes one, or is refused by name.

A mapping of settings exists only where an engine or the command line hands it
over. From there on a plugin sees an instance of the class that it declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

import attrs

from kvdock.config.convert import as_path, to_word
from kvdock.errors import SettingsError
from kvdock.units import format_seconds, parse_bytes, parse_seconds


@attrs.frozen(kw_only=True)
class Alias:
    """The name that another product gives to a setting.

    Args:
        env: An environment variable that counts where the setting is
            given nowhere else; an empty one does not count.
        parse: What its text means, where that is not the text itself.
        names: Names in the configurations of others. They are refused, with
            the name here.
    """

    env: str = ""
    parse: Callable[[str], object] = str
    names: Collection[str] = ()


@attrs.frozen(kw_only=True)
class ForeignFile:
    """A JSON file of others, which an environment variable names.

    A settings class lists the files that it reads as `foreign_files`, a class
    variable, the weakest first.

    Args:
        variable: The variable; an empty one does not count.
        read: Turns the content of the file into settings by the names here. What
            it leaves out is not given; keys that it does not know are not a mistake,
            since the file is for others.
    """

    variable: str
    read: Callable[[Mapping[str, object]], Mapping[str, object]]


def _about(about: str, alias: Alias | None, **more: object) -> dict[str, object]:
    return {"help": about, "alias": alias or Alias(), **more}


def option(
    default: object = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - as attrs.field
    alias: Alias | None = None,
    place: bool = False,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting of a type that has no function of its own here.

    `place` marks the path where pages are kept: no two backends of an attachment may
    have the same.
    """
    return attrs.field(default=default, metadata=_about(help, alias, place=place))


def secret(
    default: object = attrs.NOTHING,
    *,
    help: str,  # noqa: A002 - as attrs.field
    alias: Alias | None = None,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is never shown: a password, a token."""
    return attrs.field(
        default=default, repr=False, metadata=_about(help, alias, secret=True)
    )


def path(*, help: str, required: bool = True) -> Any:  # noqa: A002, ANN401 - as attrs.field
    """Declare the path where pages are kept.

    No two backends of an attachment may have the same. If it is not required, None or
    an empty text is none.
    """
    about = _about(help, None, place=True)
    if required:
        return attrs.field(converter=as_path, metadata=about)
    return attrs.field(
        default=None,
        converter=lambda given: as_path(given) if given not in (None, "") else None,
        metadata=about,
    )


def size(
    default: int,
    *,
    help: str,  # noqa: A002 - as attrs.field
    alias: Alias | None = None,
) -> Any:  # noqa: ANN401 - as attrs.field
    """Declare a setting that is a size in bytes."""
    return attrs.field(
        default=default,
        converter=parse_bytes,
        metadata=_about(help, alias, unit="bytes"),
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
    alias: Alias | None = None,
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
        metadata=_about(help, alias),
    )
