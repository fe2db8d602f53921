"""Settings of an engine's adapter, beside those of its plugins and of the core.

An engine hands over one flat mapping. Some keys are its own, some are for the
adapter, and all others belong to the plugin that stores the pages.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from kvdock.config.fields import choice, option, secret
from kvdock.config.schema import fields_of, structure
from kvdock.config.sources import Configuration, load_configuration
from kvdock.errors import SettingsError, did_you_mean
from kvdock.units import format_seconds

if TYPE_CHECKING:
    from kvdock.config.core import Deadlines

T = TypeVar("T")

_LONG_GRACE_S = 1.0
"""From here on the grace is what makes a deadline too long, and not the deadline."""


class Drafts(StrEnum):
    """The choices for a draft model whose KV no plugin takes."""

    STRICT = "strict"
    """The engine does not start; the message names the reasons."""
    LENIENT = "lenient"
    """The target is stored without it. A restored prefix has an empty draft
    cache: outputs stay right, fewer drafted tokens are accepted."""


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings that every adapter takes; an adapter adds `plugin` and its own."""

    tiers: tuple[Any, ...] = option(
        (), help="Instead of plugin: the backends that keep each page, near first."
    )
    routes: Mapping[str, str] = option(
        attrs.Factory(dict), help="Pool name to another backend for just that pool."
    )
    backends: Mapping[str, Any] = option(
        attrs.Factory(dict), help="Settings of the backends, by name."
    )
    core: Mapping[str, Any] = option(
        attrs.Factory(dict), help="The core's own: deadlines, breaker, calls ..."
    )
    observers: Mapping[str, Any] = option(
        attrs.Factory(dict),
        help="Settings of observers that core.observers switches on, by name.",
    )
    tenants: Mapping[str, Any] = attrs.field(
        factory=dict,
        repr=False,
        metadata={"help": "Tenants: salts with room and keys, by name."},
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


_GROUPS = ("core", "routes", "backends", "observers", "tenants")

E = TypeVar("E", bound=EngineSettings)


@attrs.frozen
class EngineConfiguration(Configuration, Generic[E]):
    """All settings of one engine process.

    Args:
        used: The backends that pools may go to.
    """

    own: E
    used: tuple[str, ...]


def split_settings(
    cls: type[T],
    given: Mapping[str, object],
    *,
    where: str,
    engine_keys: Collection[str] = (),
) -> tuple[T, dict[str, object]]:
    """Separate an adapter's settings from those of its plugin.

    The keys in `engine_keys` are left out: the engine reads them for itself.

    Returns:
        The adapter's settings, and what is left: the plugin's.

    Raises:
        SettingsError: On a wrong setting of the adapter. The plugin's are checked
            by its own schema when it is attached.
    """
    known = fields_of(cls)
    own = {key: value for key, value in given.items() if key in known}
    rest = {
        key: value
        for key, value in given.items()
        if key not in known and key not in engine_keys
    }
    return structure(cls, own, where=where), rest


def load_engine_configuration(
    own: E,
    plugins: Sequence[str],
    rest: Mapping[str, object],
    *,
    defaults: Mapping[str, object] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    lenient: bool = False,
) -> EngineConfiguration[E]:
    """Read file and environment under the settings of an engine's mapping.

    Args:
        own: The adapter's settings.
        plugins: The backends that pools may go to, besides those of `routes`.
        rest: Settings of the only plugin.
        defaults: What this engine needs where no source says otherwise, in the
            form of a file.
        file: As for `load_configuration`.
        environ: As for `load_configuration`.
        lenient: As for `load_configuration`: an engine that runs warns, and a doctor
            does not let it pass.

    Raises:
        SettingsError: If a setting is missing, wrong or unknown, or is given
            for a backend or an observer that is not used; if there are both
            plugins and tiers, or neither.
    """
    environ = os.environ if environ is None else environ
    backends = dict(own.backends)
    if len(plugins) == 1:
        mine = backends.get(plugins[0], {})
        if isinstance(mine, Mapping):
            backends[plugins[0]] = {**mine, **rest}
    tree = {"core": own.core, "backends": backends, "observers": own.observers}
    found = load_configuration(
        tree
        | ({"tiers": own.tiers} if own.tiers else {})
        | ({"tenants": own.tenants} if own.tenants else {}),
        defaults=defaults,
        file=file,
        environ=environ,
        lenient=lenient,
    )
    tiers = [tier.backend for tier in found.tiers]
    used = tuple(dict.fromkeys([*plugins, *tiers, *own.routes.values()]))
    _check_used(own, plugins, rest, used, found)
    return EngineConfiguration(
        found.core,
        found.backends,
        found.observers,
        found.origins,
        found.tiers,
        own,
        used,
    )


def with_configured(given: Mapping[str, object]) -> dict[str, object]:
    """Return settings for an engine, with what the file that is named chooses.

    Where the settings name no backend, they get the tiers, or the first backend, of the
    file that KVDOCK_CONFIG names.
    """
    settings = dict(given)
    named = {"plugin", "config", "command", "tiers"} & settings.keys()
    if named or not os.environ.get("KVDOCK_CONFIG"):
        return settings
    configured = load_configuration(lenient=True)
    if configured.tiers:
        settings["tiers"] = [attrs.asdict(tier) for tier in configured.tiers]
    elif configured.backends:
        settings["plugin"] = next(iter(configured.backends))
    return settings


def nest_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Build a configuration from pairs: `core.deadlines.get` is in two groups.

    Only names in the groups of an engine have dots.

    Raises:
        SettingsError: If a group is given as something else.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        *groups, last = name.split(".") if name.split(".")[0] in _GROUPS else [name]
        below = found
        for group in groups:
            below = below.setdefault(group, {})
            if not isinstance(below, dict):
                raise SettingsError(f"{group!r} in {name!r} is not a group of settings")
        if isinstance(value, dict) and isinstance(below.get(last), dict):
            below[last].update(value)
        else:
            below[last] = value
    return found


def _check_used(
    own: EngineSettings,
    plugins: Sequence[str],
    rest: Iterable[str],
    used: Sequence[str],
    found: Configuration,
) -> None:
    """Reject settings that would have no effect, and a configuration without any."""
    if plugins and found.tiers:
        raise SettingsError(
            f"both plugin and tiers ({found.origins['tiers']}) say where pages are "
            "stored",
            fix="Keep one of them.",
        )
    if not plugins and not found.tiers:
        raise SettingsError(
            "the configuration does not say which plugin stores the pages",
            fix='Add "plugin": with one of the names that `kvdock list` shows, or '
            '"tiers": with several of them, near first.',
        )
    if rest and len(plugins) != 1:
        several = f"with the plugins {', '.join(plugins)}" if plugins else "with tiers"
        raise SettingsError(
            f"{', '.join(rest)}: {several} it is not known whose settings these are",
            fix='Move them to "backends": {"NAME": {...}}.',
        )
    for name in own.backends:
        if name not in used:
            raise SettingsError(
                f"settings are given for backend {name!r}, which stores no pool",
                fix=did_you_mean(name, used) or f"Pools go to {', '.join(used)}.",
            )
    for name in found.observers:
        if name not in found.core.observers:
            raise SettingsError(
                f"settings are given for observer {name!r}, which is not switched on",
                fix=did_you_mean(name, found.core.observers)
                or f'Add {name!r} to the list "observers" of "core".',
            )


def check_deadlines(
    deadlines: Deadlines,
    *,
    engine: str,
    waits_for: str,
    limit_s: float,
    calls: Mapping[str, int],
) -> None:
    """Reject deadlines that are longer than an engine waits.

    Args:
        deadlines: Those in force.
        engine: Its name, for messages.
        waits_for: What it gives up on, for messages.
        limit_s: How long it waits.
        calls: Field of `Deadlines` to how many such calls one wait may take.

    Raises:
        SettingsError: With the longest deadline that would do.
    """
    for name, times in calls.items():
        seconds = getattr(deadlines, name)
        late_s = 0.0 if name == "close" else deadlines.grace
        if times * (seconds + late_s) < limit_s:
            continue
        fix = f"Choose less than {format_seconds(limit_s / times - late_s)}."
        if late_s >= _LONG_GRACE_S:
            fix = "Choose a shorter core.deadlines.grace, which comes on top."
        row = f" makes {times} such calls in a row and" if times > 1 else ""
        raise SettingsError(
            f"core.deadlines.{name} is {format_seconds(seconds)}, and {engine}{row} "
            f"gives up on {waits_for} after {format_seconds(limit_s)}",
            fix=fix,
        )
