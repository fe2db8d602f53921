"""The command `kvdock demo`."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs

from kvdock import Backend, Dock
from kvdock.errors import KvdockError, SettingsError
from kvdock.plugin import import_entry_point, list_entry_points
from kvdock.self_test import require_ready
from kvdock.testing import oracle_of
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, settings_of
from kvdock_cli.output import emit, say
from kvdock_cli.reports import demo as report
from kvdock_cli.reports._report import rendered
from kvdock_cli.terminal import style_of

_ADVICE = (
    "The demo takes another directory with --dir, and other settings with --set "
    "KEY=VALUE."
)


@attrs.frozen
class Ready:
    """Directory, settings (as given, and with that directory) and server of a demo."""

    folder: Path
    given: Mapping[str, object]
    settings: Mapping[str, object]
    notice: str
    bar: progress.Progress


@contextmanager
def prepared(
    plugin: Backend,
    path: str,
    set_: tuple[str, ...],
    dir: Path | None,  # noqa: A002 - the word for it
    *,
    stores: bool = True,
) -> Iterator[Ready]:
    """Prepare a directory, settings and perhaps a server for as long as a demo runs.

    `path` is the backend's setting for a directory, "" for none. Where a demo only
    sends, and `stores` nothing, the backend's probe does not count.
    """
    settings = dict(backend_settings(plugin.name, set_))
    if path in settings_of(set_):
        raise SettingsError(
            f"--set {path} is not for the demo, which has a store of its own",
            fix="Name a directory with --dir, or leave it out.",
        )
    settings.pop(path, None)
    try:
        if dir is not None:
            dir.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="kvdock-demo-", dir=dir) as folder,
            _server(plugin.name, settings) as (given, notice),
            progress.shown("starting") as bar,
        ):
            own = {path: given.get(path, str(Path(folder) / "store"))} if path else {}
            whole = {**given, **own}
            # What is wrong already is reported here, and not by a process that fails.
            if stores:
                require_ready(plugin, whole, _ADVICE if path else "")
            else:
                plugin.settings(whole)
            yield Ready(Path(folder), given, whole, notice, bar)
    except BrokenPipeError:
        raise  # the user reads no further
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (KvdockError if full else SettingsError)(
            f"--dir {dir or tempfile.gettempdir()} cannot be written: "
            f"{error.strerror or error}",
            fix="Free some space there, or name another directory with --dir.",
        ) from error


def _server(name: str, settings: Mapping[str, object]) -> Any:  # noqa: ANN401 - any package's
    """Return what runs the server that a backend brings along, if it brings one."""
    for one in list_entry_points("kvdock.servers"):
        if one.name == name:
            start: Any = import_entry_point(one)
            return start(settings)
    return nullcontext((settings, ""))


def demo(
    *,
    backend: str = "",
    set_: tuple[str, ...] = (),
    dir: Path | None = None,  # noqa: A002 - the word for it
    json: bool = False,
) -> int:
    """Store pages, end the process, restore them in a new one, damage some.

    Takes pages of random bytes and a few seconds. One process stores them, a second
    one restores them into empty memory and compares every byte; then pages are
    damaged on disk, and a third must notice.

    Args:
        backend: The backend to use; else the first that keeps a directory. One that
            needs a server may bring one for as long as this runs.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        dir: Where to keep the store; else in a temporary directory.
        json: Print one line of JSON.
    """
    from kvdock_cli.demo import trial  # noqa: PLC0415 - other commands need no demo

    dock = Dock.load(require=(backend,) if backend else ())
    chosen, path = trial.choose(dock, backend)
    with prepared(dock.backends[chosen], path, set_, dir) as ready:
        if not json:
            where = str(dir or "a temporary directory") if path else ""
            with ready.bar.hidden():
                say(rendered(report.head(chosen, where, ready.notice), style_of()))
        oracle = oracle_of(dock.backends[chosen], ready.settings)
        assert oracle is not None  # noqa: S101 - it was chosen for it
        ready.bar.label = "storing, restoring and damaging pages"
        place = Path(str(ready.settings[path])).parent if path else None
        steps = [*trial.run_trial(chosen, ready.settings, place, oracle)]
    done = report.report(chosen, steps, trial.DAMAGED, ready.notice)
    return emit(done, as_json=json)
