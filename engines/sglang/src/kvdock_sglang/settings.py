"""Settings in SGLang's extra configuration.

SGLang hands over one flat mapping. Some keys are its own, some are for this
adapter, and all others belong to the plugin that is to store the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.config import (
    CoreSettings,
    StagingPolicy,
    choice,
    load_configuration,
    option,
    secret,
    structure,
)
from kvdock.errors import SettingsError, did_you_mean
from kvdock.units import format_seconds
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

MOVING_S = 4.0
"""Deadline of a load or a store, where none is given: two end in time."""

_MOST_GRACE_S = 1.0
"""From here on the grace is what makes a deadline too long, and not the deadline."""


class Drafts(StrEnum):
    """What happens when no plugin takes the KV of a draft model."""

    STRICT = "strict"
    """The engine does not start; the message names the reasons."""
    LENIENT = "lenient"
    """The target is stored without it. A restored prefix has an empty draft
    cache: outputs stay right, fewer drafted tokens are accepted."""


@attrs.frozen(kw_only=True)
class AdapterSettings:
    """Settings of the adapter itself."""

    plugin: str = option(help="Backend that stores the pages, as `kvdock list` names.")
    routes: Mapping[str, str] = option(
        attrs.Factory(dict), help="Pool name to another backend for just that pool."
    )
    backends: Mapping[str, Any] = option(
        attrs.Factory(dict), help="Settings of the backends that `routes` names."
    )
    core: Mapping[str, Any] = option(
        attrs.Factory(dict), help="The core's own: deadlines, breaker, calls ..."
    )
    observers: Mapping[str, Any] = option(
        attrs.Factory(dict),
        help="Settings of observers that core.observers switches on, by name.",
    )
    drafts: Drafts = choice(
        Drafts.STRICT, help="strict or lenient, when no plugin takes draft pools."
    )
    model: str = option(
        "", help="Identity of the model; by default its served name and path."
    )
    revision: str = option(
        "", help="Which weights these are; change it whenever the weights change."
    )
    salt: str = secret("", help="Keeps this deployment's pages apart.")
    shared_storage: bool = option(
        False,
        help="All hosts of this engine reach the same store, as with a root on a "
        "network file system, whatever the plugin says of its reach.",
    )


@attrs.frozen
class Configuration:
    """All settings of one engine process.

    Args:
        own: The adapter's settings.
        core: The core's.
        backends: Backend name to its settings.
        observers: Observer name to its settings.
    """

    own: AdapterSettings
    core: CoreSettings
    backends: Mapping[str, Mapping[str, object]] = attrs.field(repr=False)
    observers: Mapping[str, Mapping[str, object]] = attrs.field(repr=False)

    def differs(self, other: Configuration) -> tuple[str, ...]:
        """Name the settings that differ; values may be secrets."""
        mine, theirs = self._in_force(), other._in_force()
        every = dict.fromkeys([*mine, *theirs])
        return tuple(one for one in every if mine.get(one) != theirs.get(one))

    def _in_force(self) -> dict[str, object]:
        own = attrs.asdict(self.own, recurse=False)
        # Files and the environment take part in these: what came of them counts.
        merged = {"core": {"": attrs.asdict(self.core, recurse=False)}}
        for section in ("backends", "observers"):
            merged[section] = getattr(self, section)
        for section in merged:
            del own[section]
        return own | {
            ".".join(filter(None, (section, name, key))): value
            for section, every in merged.items()
            for name, given in every.items()
            for key, value in given.items()
        }


def collect(given: Mapping[str, object]) -> Configuration:
    """Read the engine's mapping, the environment and kvdock's own file.

    Raises:
        SettingsError: If a setting is missing, wrong or unknown.
    """
    own, rest = split(given)
    backends = {name: dict(theirs) for name, theirs in own.backends.items()}
    backends[own.plugin] = {**backends.get(own.plugin, {}), **rest}
    found = load_configuration(
        {"core": own.core, "backends": backends, "observers": own.observers}
    )
    core = _hasty(found.core, found.origins)
    if "core.calls.staging" not in found.origins:
        # SGLang gives a page another use as soon as a call returns, whatever
        # became of it; late bytes must not find it: decision record 24.
        core = attrs.evolve(
            core, calls=attrs.evolve(core.calls, staging=StagingPolicy.ALWAYS)
        )
    _check_names(own, core, found.observers)
    _check_deadlines(core)
    return Configuration(own, core, found.backends, found.observers)


def _hasty(core: CoreSettings, origins: Mapping[str, str]) -> CoreSettings:
    """Shorten the deadlines that no source sets."""
    unsaid = [one for one in ("get", "put") if f"core.deadlines.{one}" not in origins]
    deadlines = attrs.evolve(core.deadlines, **dict.fromkeys(unsaid, MOVING_S))
    return attrs.evolve(core, deadlines=deadlines)


def _check_names(
    own: AdapterSettings, core: CoreSettings, observers: Iterable[str]
) -> None:
    """Reject names without a pool, backend or observer: they would have no effect."""
    for pool in own.routes:
        if pool not in POOL_NAMES:
            raise SettingsError(
                f"routes: SGLang has no pool {pool!r}",
                fix=did_you_mean(pool, POOL_NAMES)
                or f"It has {', '.join(sorted(POOL_NAMES))}.",
            )
    used = [own.plugin, *own.routes.values()]
    for name in own.backends:
        if name not in used:
            raise SettingsError(
                f"settings are given for backend {name!r}, which stores no pool",
                fix=did_you_mean(name, used) or f"Pools go to {', '.join(used)}.",
            )
    for name in observers:
        if name not in core.observers:
            raise SettingsError(
                f"settings are given for observer {name!r}, which is not switched on",
                fix=did_you_mean(name, core.observers)
                or f'Add {name!r} to the list "observers" of "core".',
            )


def _check_deadlines(core: CoreSettings) -> None:
    for name, calls in CALLS_IN_A_ROW.items():
        seconds = getattr(core.deadlines, name)
        late_s = 0.0 if name == "close" else core.deadlines.grace
        if calls * (seconds + late_s) >= GIVES_UP_S:
            left_s = GIVES_UP_S / calls - late_s
            fix = f"Choose less than {format_seconds(left_s)}."
            if late_s >= _MOST_GRACE_S:
                fix = "Choose a shorter core.deadlines.grace, which comes on top."
            row = f" makes {calls} such calls in a row and" if calls > 1 else ""
            raise SettingsError(
                f"core.deadlines.{name} is {format_seconds(seconds)}, and SGLang{row} "
                f"gives up on its storage threads after {format_seconds(GIVES_UP_S)}",
                fix=fix,
            )


def split(given: Mapping[str, object]) -> tuple[AdapterSettings, dict[str, object]]:
    """Separate the adapter's settings from those of the plugin.

    Returns:
        The adapter's settings, and what is left: the plugin's.

    Raises:
        SettingsError: On a missing or wrong setting of the adapter. The
            plugin's are checked by its own schema when it is attached.
    """
    where = "SGLang's storage backend configuration"
    known = {field.name for field in attrs.fields(AdapterSettings)}
    if "plugin" not in given:
        raise SettingsError(
            f"{where} does not say which plugin stores the pages",
            fix='Add "plugin": with one of the names that `kvdock list` shows.',
        )
    own = {key: value for key, value in given.items() if key in known}
    rest = {
        key: value
        for key, value in given.items()
        if key not in known and key not in ENGINE_KEYS
    }
    return structure(AdapterSettings, own, where=where), rest
