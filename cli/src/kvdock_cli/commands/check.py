"""The command `kvdock check`: wiring only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvdock import Backend
from kvdock.config import own_settings, secret_values
from kvdock.plugin import require
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, patience, settings_of
from kvdock_cli.commands._probe import require_ready
from kvdock_cli.commands.list import load
from kvdock_cli.output import UsageProblem, emit
from kvdock_cli.reports import check as report
from kvdock_cli.terminal import style_of

if TYPE_CHECKING:
    from kvdock.testing import Progress as Run


def check(  # noqa: PLR0913 - what a check depends on
    name: str,
    /,
    *,
    set_: tuple[str, ...] = (),
    small: tuple[str, ...] = (),
    faults: bool = False,
    scale: float = 1.0,
    no_large_objects: bool = False,
    only: str = "",
    timeout: float = 1800.0,
    json: bool = False,
) -> int:
    """Run the conformance kit on an installed backend.

    Prints a report to be pasted into an issue. Each test uses namespaces of
    its own and clears them, so an existing store may be named. What `--set` does
    not say is taken from kvdock's file and environment.

    Args:
        name: The backend.
        set_: A setting of it, as KEY=VALUE; may be given several times. A folder
            that is missing becomes a temporary one.
        small: A setting of a store that 100 MiB are too much for, on top.
        faults: Also inject faults between the core and the backend.
        scale: How many times slower than a local store it is, about 10 for a
            server in Python: calls get more time, and fewer of them repeat what was
            tried already.
        no_large_objects: Leave out objects of 8 MiB and more.
        only: Run the tests that have this word in their names, such as "clear", while
            a backend is written. Only a run of all of them is a verdict.
        timeout: Seconds that the whole run may take.
        json: Print one line of JSON.
    """
    if only and not only.isidentifier():
        raise UsageProblem(f"--only {only!r} is not one word of a test's name")
    tight = settings_of(small, "--small") if small else None
    settings = backend_settings(name, set_)
    found = load({name: settings}, only=name)
    plugins = {one.manifest.name: one for one in found.plugins}
    require([name], plugins, found.problems)
    settings = own_settings(settings)
    # Only this command needs the kit, and the kit needs pytest.
    from kvdock.testing import report as checkup  # noqa: PLC0415 - see above

    schema = plugins[name].manifest.settings
    whole = {**settings, **(tight or {})}
    with tempfile.TemporaryDirectory() as folder:
        for one in (settings, whole):
            # Each of some hundred tests would fail in the same way.
            resolved = checkup.resolve_settings(schema, one, Path(folder))
            backend = Backend(plugins[name])
            backend.settings(resolved)
            require_ready(backend, resolved)
    with progress.shown("collecting tests") as bar:

        def watch(run: Run) -> None:
            bar.label, bar.total, bar.done = f"check {name}", run.planned, run.ended
            failed = f"{run.failed} failed, " if run.failed else ""
            bar.note = failed + run.current.rpartition("::")[2]

        done = checkup.check(
            plugins[name].instance_of or name,
            checkup.with_scratch_paths(schema, settings),
            small=None if tight is None else checkup.with_scratch_paths(schema, tight),
            secrets=tuple(secret_values(schema, whole)) if schema else (),
            faults=faults,
            scale=scale,
            large_objects=not no_large_objects,
            only=only,
            timeout_s=patience(timeout),
            watch=watch,
        )
    if only and not done.record.planned and not done.record.broken:
        raise UsageProblem(
            f"no test has {only!r} in its name",
            fix=f"`kvdock check {name} --json` names them all.",
        )
    plugin = plugins[name].candidate
    who = f"{name} ({plugin.distribution} {plugin.version})"
    return emit(
        report.as_text(done, who, style_of()), report.as_data(done, who), as_json=json
    )
