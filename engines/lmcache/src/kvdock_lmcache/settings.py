"""Settings in the `adapter_params` of LMCache's plugin adapter.

One flat mapping: some keys are this adapter's, and all others belong to the plugin
that stores the objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from kvdock.config import (
    EngineConfiguration,
    EngineSettings,
    load_engine_configuration,
    option,
    split_settings,
)
from kvdock.errors import SettingsError

WHERE = "the adapter_params of LMCache's adapter"

DEFAULTS = MappingProxyType(
    {
        "core": {
            # LMCache gives an object's memory another use as soon as its task is
            # reported: late calls must find no object.
            "calls": {"staging": "safe"},
            "transfers": {"readers": 2, "writers": 2},
        }
    }
)
"""What holds where no file, variable or mapping says otherwise."""


@attrs.frozen(kw_only=True)
class AdapterSettings(EngineSettings):
    """Settings of the adapter itself."""

    plugin: tuple[str, ...] = option(
        (), help="Backends that store the objects, in order of preference."
    )
    lora: str = option(
        "", help="Identity of the LoRA adapter, where all requests have the same one."
    )
    page_format: str = option(
        "", help="What else decides what the bytes mean: the engine and its options."
    )


Configuration = EngineConfiguration[AdapterSettings]
"""All settings of one adapter."""


def collect(given: Mapping[str, object]) -> Configuration:
    """Read LMCache's mapping, the environment and kvdock's own file."""
    if isinstance(given.get("plugin"), str):
        given = {**given, "plugin": [given["plugin"]]}
    own, rest = split_settings(AdapterSettings, given, where=WHERE)
    if own.model:
        raise SettingsError(
            f"{WHERE}: {own.model!r} would be the model of every engine",
            fix="Leave model out: LMCache says it with each key.",
        )
    if not own.revision:
        raise SettingsError(
            f"{WHERE} do not say which weights the engines serve",
            fix='Add "revision": a commit or a checksum; LMCache\'s keys have none.',
        )
    return load_engine_configuration(
        own, own.plugin, rest, defaults=DEFAULTS, lenient=True
    )
