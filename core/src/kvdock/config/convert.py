"""Values as files and environments have them, read as what is wanted.

cattrs does the walking; what a word, a number or a list is, is said here: text
is read, and nothing is guessed.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin

from kvdock.errors import SettingsError
from kvdock.strict_enum import suggest_member

if TYPE_CHECKING:
    from cattrs import Converter

W = TypeVar("W", bound=StrEnum)

_BOOLS = MappingProxyType(
    {"1": True, "true": True, "yes": True, "on": True}
    | {
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
)


@cache
def converter() -> Converter:
    """Return what reads mappings as classes, in the rules of this module.

    It compiles a function for each class that it meets: 3 ms for settings of a backend.
    """
    from cattrs import Converter  # noqa: PLC0415 - 40 ms that a listing saves

    converter = Converter(prefer_attrib_converters=True)
    # cattrs calls the type itself: bool("no") is true and int(2.7) is 2.
    converter.register_structure_hook(bool, _to_bool)
    converter.register_structure_hook(int, _to_int)
    converter.register_structure_hook(float, _to_float)
    converter.register_structure_hook(str, _to_str)
    converter.register_structure_hook(Path, lambda value, _: as_path(value))
    # A StrEnum is a str as well, and would be taken for plain text.
    converter.register_structure_hook(StrEnum, to_word)
    converter.register_structure_hook_func(
        lambda kind: cast("object", get_origin(kind)) is tuple,
        lambda value, kind: _to_words(converter, value, kind),
    )
    return converter


_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes that Linux takes."""


def as_path(value: object) -> Path:
    """Read a path; one that begins with a tilde lies in a user's home directory.

    Raises:
        SettingsError: If it is empty, which would name the current directory, or
            is not a path that a file system can have.
    """
    if not isinstance(value, str | os.PathLike):
        raise SettingsError(f"{value!r} is not a path", fix="Write it as text.")
    text = os.fspath(cast("str", value))
    if not text or "\0" in text:
        raise SettingsError(
            f"{text!r} is not a path", fix="Write '.' for the current directory."
        )
    try:
        encoded = os.fsencode(text)
        longest = max(map(len, encoded.split(b"/")))
        if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH:
            raise SettingsError(f"{text[:40]!r}... is too long for a path")
        # No shell is in between where a file or an engine gives it.
        return Path(value).expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"{os.fspath(value)!r} begins with no known user's home directory",
            fix="Write the path in full.",
        ) from error
    except UnicodeEncodeError as error:
        raise SettingsError(
            f"{text!r} is not a path: {error.reason}", fix="Write it in UTF-8."
        ) from error


def _to_words(converter: Converter, value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type's own arguments
    """Read a list, or text with commas, as the environment has it."""
    if isinstance(value, str):
        value = [word for word in map(str.strip, value.split(",")) if word]
    if not isinstance(value, list | tuple):
        raise SettingsError(f"{value!r} is not a list")
    of, *_ = get_args(kind)
    return tuple(converter.structure(one, of) for one in value)


def to_word(value: object, kind: type[W]) -> W:
    """Read a word of a closed list."""
    words = [str(word) for word in kind]
    if str(value) in words:
        return kind(str(value))
    raise SettingsError(f"{value!r} is not known", fix=suggest_member(value, kind))


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


def _to_float(value: object, _: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError(f"{value!r} is not a number")


def _to_str(value: object, _: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not text")
