"""The command `kvdock check`: wiring only."""

from __future__ import annotations

import tempfile
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvdock import Backend
from kvdock.config import (
    as_path,
    load_configuration,
    own_settings,
    read_tiers,
    secret_values,
)
from kvdock.self_test import require_ready
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, patience, settings_of
from kvdock_cli.commands.list import load
from kvdock_cli.output import UsageProblem, emit, write_file
from kvdock_cli.reports import check as reports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.testing import Progress as Run


def check(  # noqa: PLR0913 - what a check depends on
    name: str = "",
    /,
    *,
    tiers: str = "",
    set_: tuple[str, ...] = (),
    small: tuple[str, ...] = (),
    faults: bool = False,
    scale: float = 1.0,
    no_large_objects: bool = False,
    stays: float = 3.0,
    report: str = "",
    only: str = "",
    quick: bool = False,
    timeout: float = 1800.0,
    json: bool = False,
) -> int:
    """Run the conformance kit on an installed backend, or on a chain of tiers.

    Prints a report to be pasted into an issue. Each test uses namespaces of
    its own and clears them, so an existing store may be named. What `--set` does
    not say is taken from kvdock's file and environment.

    Args:
        name: The backend.
        tiers: Instead of a backend, the backends or instances of a chain, near first,
            with commas between them; their settings are those of file and environment.
        set_: A setting of it, as KEY=VALUE; may be given several times. A folder
            that is missing becomes a temporary one.
        small: A setting of a store that 100 MiB are too much for, on top.
        faults: Also inject faults between the core and the backend.
        scale: How many times slower than a local store it is, about 10 for a
            server in Python: calls get more time, and fewer of them repeat what was
            tried already.
        no_large_objects: Leave out objects of 8 MiB and more.
        stays: Seconds for which pages are left alone where nothing is evicted; some
            servers let them expire later than that.
        report: Also write the report to this file, as data: versions, date, what
            became of each declared word, and the tests that did not pass. In the
            backend's package, as `kvdock-report.json`, it is what the core believes.
        only: Run the tests that have this word in their names, such as "clear", while
            a backend is written. Only a run of all of them is a verdict.
        quick: Leave out the tests that take long with any store: those that start
            processes, move many pages or wait.
        timeout: Seconds that the whole run may take.
        json: Print one line of JSON.
    """
    if only and not only.isidentifier():
        raise UsageProblem(f"--only {only!r} is not one word of a test's name")
    if tiers and (set_ or small or faults):
        raise UsageProblem("--tiers goes without --set, --small and --faults")
    tight: dict[str, object] = {**settings_of(small, "--small")}
    given = _given(name, tiers, set_)
    plugins = load(given, only=name).require([*given])
    given = {one: own_settings(settings) for one, settings in given.items()}
    # Only this command needs the kit, and the kit needs pytest.
    from kvdock.testing import report as checkup  # noqa: PLC0415 - see above

    secrets: list[str] = []
    scratch: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one, settings in given.items():
            schema = plugins[one].manifest.settings
            whole = {**settings, **tight}
            secrets += secret_values(schema, whole) if schema else ()
            scratch[one] = checkup.with_scratch_paths(schema, settings)
            tight = checkup.with_scratch_paths(schema, tight)
            for tried in (settings, whole):
                # Each of some hundred tests would fail in the same way.
                resolved = checkup.resolve_settings(schema, tried, Path(folder, one))
                with progress.shown(f"waiting for the probe of {one}"):
                    require_ready(
                        Backend(plugins[one]), resolved, timeout_s=patience(timeout)
                    )
    nearest = next(iter(given))
    with progress.shown("collecting tests") as bar:

        def watch(run: Run) -> None:
            what = f"check {name or tiers}"
            bar.label, bar.total, bar.done = what, run.planned, run.ended
            failed = f"{run.failed} failed, " if run.failed else ""
            bar.note = failed + run.current.rpartition("::")[2]

        done = checkup.check(
            plugins[nearest].instance_of or nearest,
            scratch[nearest],
            small=tight if small else None,
            tiers={
                one: {**settings, "plugin": plugins[one].instance_of or one}
                for one, settings in scratch.items()
            }
            if tiers
            else None,
            secrets=secrets,
            faults=faults,
            scale=scale,
            large_objects=not no_large_objects,
            stays_s=patience(stays),
            only=only,
            quick=quick,
            timeout_s=patience(timeout),
            watch=watch,
        )
    if only and not done.record.planned and not done.record.broken:
        raise UsageProblem(
            f"no test has {only!r} in its name",
            fix=f"`kvdock check {name or '--tiers ' + tiers} --json` names them all.",
        )
    who = ", ".join(
        f"{one} ({plugins[one].candidate.distribution} "
        f"{plugins[one].candidate.version})"
        for one in given
    )
    made = reports.report(done, who)
    if report:
        whole = made.as_data()
        tests = cast("list[Mapping[str, object]]", whole["tests"])
        whole["tests"] = [one for one in tests if one["outcome"] != "passed"]
        write_file(as_path(report), dumps(whole, indent=1) + "\n")
    return emit(made, as_json=json)


def _given(
    name: str, tiers: str, set_: tuple[str, ...]
) -> dict[str, Mapping[str, object]]:
    """Return the settings of a backend, or of each tier."""
    if bool(name) == bool(tiers):
        raise UsageProblem(
            "either a backend or --tiers is needed", fix="Write `kvdock check NAME`."
        )
    if name:
        return {name: backend_settings(name, set_)}
    backends = load_configuration().backends
    names = [tier.backend for tier in read_tiers(tiers, "--tiers")]
    return {one: backends.get(one, {}) for one in names}
