"""Settings of the HiCache backend."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from kvdock.config import choice, count, option, size
from kvdock.errors import SettingsError

_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Form(StrEnum):
    """Which methods of a class move pages."""

    AUTO = "auto"
    """`v1` where the class defines it, and `generic` otherwise."""
    GENERIC = "generic"
    """`batch_get` and `batch_set`, with a tensor for each page."""
    V1 = "v1"
    """`batch_get_v1` and `batch_set_v1`, with indices of a host pool."""
    V2 = "v2"
    """`batch_get_v2` and `batch_set_v2`, with every page as one of the pool `kv`."""


def _mapping(given: object, field: attrs.Attribute[Any]) -> Mapping[str, object]:
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given or "{}")
        except ValueError as error:
            raise SettingsError(f"{field.name} is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise SettingsError(
            f"{field.name} is not a mapping: {given!r}",
            fix='Give a table, or JSON such as {"file_storage_path": "/data"}.',
        )
    return dict(found)


def _class_path(given: object) -> str:
    if not isinstance(given, str) or not _CLASS.fullmatch(given):
        raise SettingsError(
            f"storage_class is not a module and a class: {given!r}",
            fix="Write it as MODULE:CLASS, for example "
            "sglang.srt.mem_cache.hicache_storage:HiCacheFile.",
        )
    return given


def _about(text: str) -> dict[str, object]:
    """Describe a mapping, which may be given as JSON."""
    return {
        "factory": dict,
        "converter": attrs.Converter(_mapping, takes_field=True),
        "metadata": option({}, help=text).metadata,
    }


@attrs.frozen
class HiCacheSettings:
    """Settings of the HiCache backend.

    Raises:
        SettingsError: If a value is not of its kind.
    """

    storage_class: str = attrs.field(
        converter=_class_path,
        metadata=option(help="The class, as MODULE:CLASS. Code of it is run.").metadata,
    )
    # Any: text, which is read as JSON, or a table.
    extra_config: Any = attrs.field(
        **_about("Options of the class, as for SGLang's extra config: JSON.")
    )
    arguments: Any = attrs.field(
        **_about("Keyword arguments of the class's constructor: JSON.")
    )
    form: Form = choice(Form.AUTO, help="Which methods of the class move pages.")
    batch_keys: int = count(
        128, least=1, most=65536, help="Most pages of one call of the class."
    )
    memory: int = size(
        256 << 20,
        help="Host memory that pages are copied through, half of it for reads.",
    )
