"""Settings of an engine's adapter, beside those of its plugins and of the core.

An engine hands over one flat mapping. Some keys are its own, some are for the
adapter, and all others belong to the plugin that stores the pages.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    """What happens when no plugin takes the KV of a draft model."""

    STRICT = "strict"
    """The engine does not start; the message names the reasons."""
    LENIENT = "lenient"
    """The target is stored without it. A restored prefix has an empty draft
    cache: outputs stay right, fewer drafted tokens are accepted."""


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Settings that every adapter takes; an adapter adds `plugin` and its own."""

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


def split_settings(
    cls: type[T],
    given: Mapping[str, object],
    *,
    where: str,
    engine_keys: Collection[str] = (),
) -> tuple[T, dict[str, object]]:
    """Separate an adapter's settings from those of its plugin.

    Args:
        cls: The adapter's settings, with a field `plugin`.
        given: The engine's mapping.
        where: Whose mapping it is, for messages.
        engine_keys: Keys that the engine reads for itself.

    Returns:
        The adapter's settings, and what is left: the plugin's.

    Raises:
        SettingsError: On a missing or wrong setting of the adapter. The
            plugin's are checked by its own schema when it is attached.
    """
    if "plugin" not in given:
        raise SettingsError(
            f"{where} does not say which plugin stores the pages",
            fix='Add "plugin": with one of the names that `kvdock list` shows.',
        )
    known = fields_of(cls)
    own = {key: value for key, value in given.items() if key in known}
    rest = {
        key: value
        for key, value in given.items()
        if key not in known and key not in engine_keys
    }
    return structure(cls, own, where=where), rest


def load_engine_configuration(
    own: EngineSettings,
    plugins: Sequence[str],
    rest: Mapping[str, object],
    *,
    defaults: Mapping[str, object] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Configuration:
    """Read file and environment under the settings of an engine's mapping.

    Args:
        own: The adapter's settings.
        plugins: The backends that pools may go to, besides those of `routes`.
        rest: Settings of the only plugin.
        defaults: What this engine needs where no source says otherwise, in the
            form of a file.
        file: As for `load_configuration`.
        environ: As for `load_configuration`.

    Raises:
        SettingsError: If a setting is missing, wrong or unknown, or is given
            for a backend or an observer that is not used.
    """
    backends = dict(own.backends)
    if rest and len(plugins) != 1:
        raise SettingsError(
            f"{', '.join(rest)}: with the plugins {', '.join(plugins)} it is not "
            "known whose settings these are",
            fix='Move them to "backends": {"NAME": {...}}.',
        )
    if len(plugins) == 1:
        mine = backends.get(plugins[0], {})
        if isinstance(mine, Mapping):
            backends[plugins[0]] = {**mine, **rest}
    found = load_configuration(
        {"core": own.core, "backends": backends, "observers": own.observers},
        defaults=defaults,
        file=file,
        environ=environ,
    )
    _check_used(own, plugins, found)
    return found


def _check_used(
    own: EngineSettings, plugins: Sequence[str], found: Configuration
) -> None:
    """Reject settings of backends and observers that would have no effect."""
    used = list(dict.fromkeys([*plugins, *own.routes.values()]))
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
