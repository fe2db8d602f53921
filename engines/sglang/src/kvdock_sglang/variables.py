"""Which environment variables of SGLang decide what the bytes of a page mean.

All of them do that are set to anything but their default, except those that
`variables.toml` lists, each with the reason why a page holds the same whatever they
say. A variable that neither SGLang's registry nor this list knows keeps its pages
apart.
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

EXEMPTIONS = read_exemptions(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[
        "exempt"
    ]
)
"""Patterns of names without their prefix."""

_PREFIX = "SGLANG_"


def is_exempt(name: str) -> bool:
    """Return whether pages are the same whatever a variable says."""
    short = name.removeprefix(_PREFIX)
    return any(fnmatchcase(short, one.field) for one in EXEMPTIONS)


def identity_variables() -> dict[str, object]:
    """Return what counts of SGLang's environment variables, as plain data.

    A value that SGLang wrote itself, as a conclusion from the model, counts too.
    """
    known = {field.name for field in _fields()}
    found: dict[str, object] = {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and name not in known
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
