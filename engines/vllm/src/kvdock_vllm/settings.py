"""Settings in vLLM's `kv_connector_extra_config`.

vLLM hands over one flat mapping. Some keys go on to its own offloading, some are
for this adapter, and all others belong to the plugin that stores the pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.config import (
    EngineConfiguration,
    EngineSettings,
    choice,
    count,
    duration,
    load_engine_configuration,
    option,
    split_settings,
)
from kvdock.errors import SettingsError
from kvdock.identity import WeightsBy
from kvdock.units import format_bytes, parse_bytes
from kvdock_vllm.engine_api import installed_version, takes_option

WHERE = "vLLM's kv_connector_extra_config"

LEAST_HOST_MEMORY = 1 << 16
"""No block of any model is smaller, and a number without its unit is."""

DEFAULTS = MappingProxyType(
    {
        "core": {
            # vLLM gives a row another use as soon as its job is reported, and a job
            # must end at its deadline: late calls must find no row.
            "calls": {"staging": "safe"},
            "transfers": {"readers": 2, "writers": 2, "queue": 256},
        }
    }
)
"""What holds where no file, variable or mapping says otherwise."""

EVENT_PAGES = 1 << 18
"""Pages of each pool that KV events keep track of: 75 MiB at 300 bytes each."""

UPSTREAM = MappingProxyType(
    {
        "cpu_bytes_to_use": '"host_memory": "10 GiB"',
        "block_size": '"blocks_per_chunk"',
        "secondary_tiers": '"plugin": with a name that `kvdock list` shows',
        "self_describing_kv_events": '"enable_kv_events": true',
        "store_threshold": "not supported by vLLM where there is a tier behind host "
        "memory",
        "max_tracker_size": "not supported: it belongs to store_threshold",
        "spec_name": "no setting: kvdock chooses it",
        "spec_module_path": "no setting: kvdock chooses it",
    }
)
"""Keys of vLLM's own offloading connector, and what is said here instead."""


class Eviction(StrEnum):
    """The rows of host memory that vLLM evicts first."""

    LRU = "lru"
    """Those that were not used for longest."""
    ARC = "arc"
    """Those that were used once, before those that were used often."""


@attrs.frozen(kw_only=True)
class AdapterSettings(EngineSettings):
    """Settings of the adapter itself, and of the offloading that it stands behind."""

    plugin: tuple[str, ...] = option(
        (), help="Backends that store the pages, in order of preference."
    )
    host_memory: int = attrs.field(
        converter=parse_bytes,
        metadata={
            "help": "Host memory of all ranks, in /dev/shm, that pages pass through.",
            "unit": "bytes",
        },
    )
    blocks_per_chunk: int = count(
        1, least=1, help="Blocks of vLLM's that make one page of a pool."
    )
    canonical_layout: bool = option(
        False,
        help="Keep host memory as vLLM does for all TP sizes, so that engines of other "
        "sizes find the pages.",
    )
    weights: WeightsBy = choice(
        WeightsBy.WHOLE,
        help="How weights in a folder are known: whole, their content; headers, the "
        "header, size and time of each safetensors file, which a copy does not have.",
    )
    generations: str = option(
        "private",
        help="Whose pages are found after weights were replaced at run time: "
        "private, this engine's alone; run:NAME, those of all engines of that run "
        "with the same weight_version.",
    )
    kept_generations: int = count(
        1,
        help="Earlier versions of the run whose pages stay, once no engine has "
        "them open.",
    )
    offload_prompt_only: bool = option(
        False, help="Store pages of prompts, and not those of answers."
    )
    eviction_policy: Eviction = choice(
        Eviction.LRU, help="How vLLM evicts from host memory: lru or arc."
    )
    wait_for_host_memory: float = duration(
        "10 s",
        help="How long a request waits for host memory to load into, where it is not "
        "known what computing would take. Then it loads what there is room for.",
    )
    backpressure: Mapping[str, Any] | None = option(
        None, help="When vLLM skips stores to a slow backend: its own mapping."
    )
    sync_load_budget_bytes: int | None = option(
        None, help="How much vLLM 0.33 may load within a step."
    )
    enable_kv_events: bool = option(
        False, help="Publish which pages storage has, where vLLM publishes KV events."
    )

    @property
    def upstream(self) -> dict[str, object]:
        """The settings of vLLM's own offloading."""
        given: dict[str, object] = {
            "cpu_bytes_to_use": self.host_memory,
            "eviction_policy": str(self.eviction_policy),
            "offload_prompt_only": self.offload_prompt_only,
        }
        if self.backpressure is not None:
            given["backpressure"] = dict(self.backpressure)
        if self.sync_load_budget_bytes is not None:
            given["sync_load_budget_bytes"] = self.sync_load_budget_bytes
        if self.blocks_per_chunk > 1:
            given["blocks_per_chunk"] = self.blocks_per_chunk
        if self.canonical_layout:
            given["canonical_layout"] = True
        if self.enable_kv_events:
            # Without it vLLM publishes storage's blocks as a hash alone.
            given["self_describing_kv_events"] = True
        return given


Configuration = EngineConfiguration[AdapterSettings]
"""All settings of one engine."""


def collect(
    given: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    lenient: bool = False,
) -> Configuration:
    """Read the engine's mapping, the environment and kvdock's own file.

    If `lenient`, variables that are no settings are logged instead of raised: an engine
    starts with them.

    Raises:
        SettingsError: If a setting is missing, wrong or unknown.
    """
    environ = os.environ if environ is None else environ
    for key, here in UPSTREAM.items():
        if key in given:
            raise SettingsError(
                f"{WHERE}: {key!r} is a setting of vLLM's own OffloadingConnector",
                fix=f"Say {here}." if here.startswith('"') else f"It is {here}.",
            )
    plugin = given.get("plugin", ())
    if isinstance(plugin, str):
        given = {**given, "plugin": [plugin]}
    elif "plugin" in given and not plugin:
        raise SettingsError(f"{WHERE}: the list of plugins is empty")
    if "host_memory" not in given:
        raise SettingsError(
            f"{WHERE} does not say how much host memory pages may pass through",
            fix='Add "host_memory": "10 GiB"; it lies in /dev/shm.',
        )
    own, rest = split_settings(AdapterSettings, given, where=WHERE)
    _check_size(given["host_memory"], own.host_memory)
    if own.sync_load_budget_bytes is not None:
        _check_taken("sync_load_budget_bytes")
    defaults: Mapping[str, object] = DEFAULTS
    if own.enable_kv_events:
        core = {**DEFAULTS["core"], "page_events": EVENT_PAGES}
        defaults = {**DEFAULTS, "core": core}
    return load_engine_configuration(
        own, own.plugin, rest, defaults=defaults, environ=environ, lenient=lenient
    )


def _check_taken(option: str) -> None:
    """Reject an option of vLLM's that the installed release does not have.

    Raises:
        SettingsError: With that release.
    """
    if not takes_option(option):
        raise SettingsError(
            f"{WHERE}: vLLM {installed_version()} has no {option}",
            fix="Leave it out, or use a newer vLLM.",
        )


def _check_size(given: object, host_memory: int) -> None:
    """Reject a size that lacks its unit.

    Raises:
        SettingsError: With one that was probably meant.
    """
    if host_memory < LEAST_HOST_MEMORY:
        raise SettingsError(
            f"{WHERE}: host_memory {given!r} is {format_bytes(host_memory)}, which is "
            "no room for pages",
            fix=f"Say the unit, as in '{str(given).split()[0]} GiB'.",
        )


def check_host_memory(host_memory: int, row_bytes: int) -> None:
    """Reject host memory that holds no row.

    Raises:
        SettingsError: With the least that does.
    """
    if host_memory < row_bytes:
        raise SettingsError(
            f"host_memory is {format_bytes(host_memory)}, and one chunk takes "
            f"{format_bytes(row_bytes)}",
            fix="Give room for the pages of several prompts.",
        )
