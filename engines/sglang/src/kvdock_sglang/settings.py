"""Settings in SGLang's extra configuration.

SGLang hands over one flat mapping. Some keys are its own, some are for this
adapter, and all others belong to the plugin that is to store the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from kvdock.config import (
    EngineConfiguration,
    EngineSettings,
    check_deadlines,
    choice,
    count,
    load_engine_configuration,
    option,
    split_settings,
)
from kvdock.errors import SettingsError, did_you_mean
from kvdock.identity import WeightsBy
from kvdock_sglang.pool_names import POOL_NAMES

ENGINE_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "file_storage_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys that SGLang reads for itself; it leaves some of them in the mapping."""

GIVES_UP_S = 10.0
"""How long SGLang waits for its storage threads to stop, when it detaches or resets.

Source: SGLang 0.5.23, `HiCacheController._stop_storage_threads`. Where it resets
its cache the error that follows ends the engine.
"""

CALLS_IN_A_ROW = MappingProxyType({"exists": 1, "get": 2, "put": 2, "close": 1})
"""Calls that one of its threads makes without a look whether it is to stop.

The target's pages, and in a call of their own those that go with them; after
a failed one the thread makes none.
"""

DEFAULTS = MappingProxyType(
    {
        "core": {
            # SGLang gives a page another use as soon as a call returns, whatever
            # became of it; late bytes must not find it: decision record 24.
            "calls": {"staging": "safe"},
            # Two calls in a row end in time.
            "deadlines": {"get": "4 s", "put": "4 s"},
        }
    }
)
"""What holds where no file, variable or mapping says otherwise."""


@attrs.frozen(kw_only=True)
class AdapterSettings(EngineSettings):
    """Settings of the adapter itself."""

    plugin: str = option(
        "", help="Backend that stores the pages, as `kvdock list` names."
    )
    shared_storage: bool = option(
        False,
        help="All hosts of this engine reach the same store, as with a root on a "
        "network file system, whatever the plugin says of its reach.",
    )
    weights: WeightsBy = choice(
        WeightsBy.HEADERS,
        help="headers: safetensors files are known by header, size and time, so a "
        "copy on another host is another model; whole: by their content.",
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


Configuration = EngineConfiguration[AdapterSettings]
"""All settings of one engine."""


def differing(mine: Configuration, theirs: Configuration) -> tuple[str, ...]:
    """Name the settings that differ; values may be secrets."""
    one, other = _in_force(mine), _in_force(theirs)
    every = dict.fromkeys([*one, *other])
    return tuple(name for name in every if one.get(name) != other.get(name))


def _in_force(given: Configuration) -> dict[str, object]:
    own = attrs.asdict(given.own, recurse=False)
    # Files and the environment take part in these: what came of them counts.
    merged = {
        "core": {"": attrs.asdict(given.core, recurse=False)},
        "backends": given.backends,
        "observers": given.observers,
    }
    for section in merged:
        del own[section]
    own["tiers"] = given.tiers
    return own | {
        ".".join(filter(None, (section, name, key))): value
        for section, every in merged.items()
        for name, one in every.items()
        for key, value in one.items()
    }


def collect(given: Mapping[str, object], *, lenient: bool = False) -> Configuration:
    """Read the engine's mapping, the environment and kvdock's own file.

    If `lenient`, variables that are no settings are logged instead of raised: an engine
    starts with them.
    """
    own, rest = split_settings(
        AdapterSettings,
        given,
        where="SGLang's storage backend configuration",
        engine_keys=ENGINE_KEYS,
    )
    for pool in own.routes:
        if pool not in POOL_NAMES:
            raise SettingsError(
                f"routes: SGLang has no pool {pool!r}",
                fix=did_you_mean(pool, POOL_NAMES)
                or f"It has {', '.join(sorted(POOL_NAMES))}.",
            )
    plugins = [own.plugin] if own.plugin else []
    found = load_engine_configuration(
        own, plugins, rest, defaults=DEFAULTS, lenient=lenient
    )
    check_deadlines(
        found.core.deadlines,
        engine="SGLang",
        waits_for="its storage threads",
        limit_s=GIVES_UP_S,
        calls=CALLS_IN_A_ROW,
    )
    return found
