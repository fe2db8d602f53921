"""Which environment variables decide what the bytes of a page mean.

All of SGLang's do that are set to anything but their default, except those that
`variables.toml` lists, each with the reason why a page holds the same whatever they
say. A variable that neither SGLang's registry nor this list knows keeps its pages
apart. So do variables of the libraries that compute, by the patterns that it counts.
"""

from __future__ import annotations

import os
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.identity import read_exemptions
from kvdock_sglang.launch_arguments import canonical_argument

if TYPE_CHECKING:
    from collections.abc import Iterator

_LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

EXEMPTIONS = read_exemptions(_LISTED["exempt"])
"""Patterns of names without their prefix."""

_PREFIX = "SGLANG_"

COUNTED = (f"{_PREFIX}*", *_LISTED["counted"]["names"].split())
"""Patterns of names that count where nothing exempts them."""


def is_exempt(name: str) -> bool:
    """Return whether pages are the same whatever a variable says."""
    short = name.removeprefix(_PREFIX)
    return any(fnmatchcase(short, one.field) for one in EXEMPTIONS)


def identity_variables() -> dict[str, object]:
    """Return what counts of the environment variables, as plain data.

    A value that SGLang wrote itself, as a conclusion from the model, counts too.
    """
    known = {field.name for field in _fields()}
    found: dict[str, object] = {
        name: text
        for name, text in os.environ.items()
        if name not in known and any(fnmatchcase(name, one) for one in COUNTED)
    }
    found |= _resolved()
    return {
        name: canonical_argument(name, value)
        for name, value in found.items()
        if not is_exempt(name)
    }


def _resolved() -> Iterator[tuple[str, Any]]:
    for field in _fields():
        default = field.default() if callable(field.default) else field.default
        # An alias may speak for a name that is not set itself.
        if (value := field.get()) != default:
            yield field.name, value


def _fields() -> list[Any]:
    from sglang.srt.environ import EnvField, Envs  # noqa: PLC0415 - the engine

    return [one for one in vars(Envs).values() if isinstance(one, EnvField)]
