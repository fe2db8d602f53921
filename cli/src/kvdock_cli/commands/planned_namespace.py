"""`kvdock route --namespace`: whose pages an engine would find, before it starts.

Adapters read a command of their engine, as entry points `route.ENGINE` of
`kvdock.commands`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdock.errors import NamespaceError
from kvdock.namespace import decode_record, diff_records
from kvdock.plugin import import_entry_point
from kvdock_cli import progress
from kvdock_cli.arguments import settings_of, text_of
from kvdock_cli.commands.list import load
from kvdock_cli.commands.run import adapter_of, engines, storage_settings
from kvdock_cli.commands.store import open_store
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import planned_namespace as report

if TYPE_CHECKING:
    from kvdock.launch import NamespacePlan
    from kvdock.namespace import Difference, Record


def compare(
    command: Sequence[str], against: str, set_: tuple[str, ...], *, as_json: bool
) -> int:
    """Say which stored namespace an engine would use, or what separates it from one.

    Args:
        command: The engine's command.
        against: A store, or a file with what this has printed as JSON for another
            command; "" for the directory of the settings.
        set_: Settings of the adapter or its backend, as KEY=VALUE.
        as_json: Print one line of JSON.
    """
    if not command:
        raise UsageProblem(
            "--namespace needs the command of an engine",
            fix="Write it behind two dashes: kvdock route --namespace -- vllm serve "
            "MODEL",
        )
    settings = storage_settings(settings_of(set_))
    target = against or _directory(settings)
    if against and "://" not in against and not Path(against).exists():
        raise UsageProblem(f"there is neither a store nor a file at {against}")
    candidates = _candidates(target)
    read: Any = import_entry_point(adapter_of(command, engines("route.")))
    # Engines write their logs to standard output, which is for the answer.
    with progress.shown("reading the command"), redirect_stdout(sys.stderr):
        plan: NamespacePlan = read(command, settings)
    compared = {
        name: _nearest(record, plan.loaded, candidates.get(name, candidates[""]))
        for name, record in plan.records.items()
    }
    return emit(report.report(plan, compared, target), as_json=as_json)


def _directory(settings: Mapping[str, object]) -> str:
    """Return the directory in which a backend keeps its pages by its settings."""
    for plugin in load().plugins:
        manifest = plugin.manifest
        if settings.get("plugin") in (manifest.name, [manifest.name]):
            return str(settings.get(manifest.path_setting or "") or "")
    return ""


def _candidates(target: str) -> dict[str, Mapping[str, Record]]:
    """Return the records to compare with by their digest; of a file, by what has them.

    The key "" is for all that have none of their own.
    """
    path = Path(target) if target else None
    if path is None or (not path.exists() and "://" not in target):
        return {"": {}}
    if not path.is_file():
        store = open_store(target, ())
        records = ((name, store.record(name)) for name in store.namespaces())
        return {"": {name: record for name, record in records if record}}
    try:
        planned = json.loads(text_of(path))["records"]
        return {"": {}} | {
            name: {path.name: decode_record(json.dumps(record).encode(), where=target)}
            for name, record in planned.items()
        }
    except (AttributeError, LookupError, NamespaceError, TypeError, ValueError) as bad:
        raise UsageProblem(
            f"{target} is not what `kvdock route --namespace --json` prints",
            fix="Give a store, or a file with that line.",
        ) from bad


def _nearest(
    record: Record, loaded: Sequence[str], candidates: Mapping[str, Record]
) -> report.Compared | None:
    """Return the candidate that differs in the fewest fields from a record."""

    def each() -> Iterator[report.Compared]:
        for name, other in candidates.items():
            settled: list[Difference] = []
            open_: list[Difference] = []
            for difference in diff_records(other, record):
                # What only one side knows yet is no difference.
                later = "-" in (difference.left, difference.right) and any(
                    difference.field == field
                    or difference.field.startswith(f"{field}.")
                    for field in loaded
                )
                (open_ if later else settled).append(difference)
            yield report.Compared(name, settled, open_)

    return min(each(), key=lambda it: len(it.differences), default=None)
