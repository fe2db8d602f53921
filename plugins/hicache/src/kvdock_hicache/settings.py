"""Settings of the HiCache backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from kvdock.config import choice, count, option, size
from kvdock.errors import SettingsError


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


def _mapping(given: object) -> Mapping[str, object]:
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise SettingsError(
            f"extra_config is neither a table nor JSON: {given!r}",
            fix='Give it as in {"file_storage_path": "/data"}.',
        )
    return dict(found)


@attrs.frozen
class HiCacheSettings:
    """Settings of the HiCache backend.

    Raises:
        SettingsError: If a value is not of its kind.
    """

    storage_class: str = option(help="The class, as MODULE:CLASS; its code is run.")
    # Any: a table, or text that is read as JSON.
    extra_config: Any = attrs.field(
        factory=dict,
        converter=_mapping,
        metadata=option(help="Options of the class, as for SGLang: JSON.").metadata,
    )
    form: Form = choice(Form.AUTO, help="Which methods of the class move pages.")
    batch_keys: int = count(
        128, least=1, most=65536, help="Most pages of one call of the class."
    )
    memory: int = size(
        256 << 20,
        help="Host memory that pages are copied through, half of it for reads.",
    )
