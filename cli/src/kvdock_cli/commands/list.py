"""The command `kvdock list`: wiring only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.plugin import (
    OBSERVERS_GROUP,
    TRIAL_S,
    add_instances,
    list_entry_points,
    load_all,
    missing_allowed,
    named_instances,
    selection,
    split_duplicates,
    try_each,
)
from kvdock_cli.output import emit
from kvdock_cli.reports import list as report
from kvdock_cli.terminal import style_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def list_backends(*, json: bool = False, markdown: bool = False) -> int:
    """List the installed backends and what they declare, and the observers.

    Reads what they declare and nothing else: no client library is imported
    and no connection opened. Each is tried in a process of its own first, so that
    one that crashes or hangs is a row of the answer.

    Args:
        json: Print one line of JSON.
        markdown: Print the table of the README.
    """
    found = load()
    text = report.as_markdown(found) if markdown else report.as_text(found, style_of())
    return emit(text, report.as_data(found), as_json=json)


def load(
    settings: Mapping[str, object] | None = None,
    *,
    only: str = "",
    timeout_s: float = TRIAL_S,
) -> report.Listing:
    """Load backends that may be used, each tried in a process of its own.

    Args:
        settings: Backend name to what is given for it: those that name a plugin
            are instances, and are listed as well.
        only: The one that is needed; "" for all.
        timeout_s: Time for the trial of each.

    Raises:
        SettingsError: If an instance cannot have its name.
    """
    given = settings or {}
    chosen = selection()
    candidates = list_entry_points()
    kept, hidden = chosen.of(candidates)
    # Where it is not there, the others are named.
    needed = named_instances(given).get(only, only)
    wanted = tuple(one for one in kept if one.name == needed) or kept
    alone, problems = split_duplicates(wanted)
    unfit = try_each(alone, timeout_s)
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
