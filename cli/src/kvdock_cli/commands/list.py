"""The command `kvdock list`: wiring only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvdock.plugin import (
    OBSERVERS_GROUP,
    TRIAL_S,
    list_entry_points,
    missing_allowed,
    selection,
    split_duplicates,
    try_each,
)
from kvdock_cli.output import emit
from kvdock_cli.reports import list as report
from kvdock_cli.reports import manifest

_CONFIGURED = ("KVDOCK_CONFIG", "KVDOCK_BACKENDS__")

if TYPE_CHECKING:
    from collections.abc import Mapping


def list_backends(name: str = "", /, *, json: bool = False) -> int:
    """List backends, the configured instances of them, and the observers.

    Reads what they declare and the configuration, and nothing else: no client
    library is imported and no connection opened. Each is tried in a process of
    its own first, so that one that crashes or hangs is a row of the answer.

    Args:
        name: Show everything that this backend declares, with its settings.
        json: Print one line of JSON.
    """
    found = load(_configured(), only=name)
    if name:
        return emit(manifest.report(found.require([name])[name]), as_json=json)
    return emit(report.report(found), as_json=json)


def _configured() -> Mapping[str, object]:
    """Return the settings of backends, read only where some may be: 60 ms."""
    if not any(name.startswith(_CONFIGURED) for name in os.environ):
        return {}
    from kvdock.config import load_configuration  # noqa: PLC0415 - see above

    return load_configuration().backends


def load(
    settings: Mapping[str, object] | None = None,
    *,
    only: str = "",
    timeout_s: float = TRIAL_S,
) -> report.Listing:
    """Load backends that may be used, each tried in a process of its own.

    Those of `settings` that name a plugin are instances, and are listed as well.

    Raises:
        SettingsError: If an instance cannot have its name.
    """
    given = settings or {}
    chosen = selection()
    candidates = list_entry_points()
    kept, hidden = chosen.of(candidates)
    needed = only
    if given:
        from kvdock.plugin import named_instances  # noqa: PLC0415 - it imports the loader

        needed = named_instances(given).get(only, only)
    # Where it is not there, the others are named.
    wanted = tuple(one for one in kept if one.name == needed) or kept
    alone, problems = split_duplicates(wanted)
    unfit = try_each(alone, timeout_s)
    # Imported while they are tried.
    from kvdock.plugin import add_instances, load_all  # noqa: PLC0415 - see above

    plugins, more = load_all([one for one in alone if one not in unfit])
    plugins, absent = add_instances(plugins, given, {one.name for one in candidates})
    observers, others = chosen.of(list_entry_points(OBSERVERS_GROUP))
    return report.Listing(
        plugins=tuple(plugins.values()),
        observers=observers,
        problems=(
            *problems,
            *unfit.values(),
            *more,
            *absent,
            *missing_allowed(candidates, chosen),
        ),
        hidden=sorted({one.name for one in (*hidden, *others)}),
    )
