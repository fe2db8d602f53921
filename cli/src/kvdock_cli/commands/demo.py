"""The command `kvdock demo`."""

from __future__ import annotations

import errno
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvdock import Dock
from kvdock.errors import KvdockError, SettingsError
from kvdock.plugin import import_entry_point, list_entry_points
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, settings_of
from kvdock_cli.commands._probe import require_ready
from kvdock_cli.demo.server import served
from kvdock_cli.output import FINE, PROBLEM, UsageProblem, emit, say
from kvdock_cli.reports import demo as report
from kvdock_cli.reports._style import Style, Tone
from kvdock_cli.terminal import style_of

GROUP = "kvdock.demos"
"""Entry points of demos that other distributions bring, by the option's name."""
_MODELS, _SEND = "models", "send"

_ADVICE = (
    "The demo takes another directory with --dir, and other settings with --set "
    "KEY=VALUE."
)


def demo(  # noqa: PLR0913 - one option each
    *,
    models: bool = False,
    send: bool = False,
    model: str = "",
    backend: str = "",
    set_: tuple[str, ...] = (),
    dir: Path | None = None,  # noqa: A002 - the word for it
    size: str = "",
    json: bool = False,
) -> int:
    """Store pages, end the process, restore them in a new one, damage some.

    Takes pages of random bytes and a few seconds. One process stores them, a second
    one restores them into empty memory and compares every byte; then pages are
    damaged on disk, and a third must notice. With --models real caches of tiny
    transformers go the same way, which takes a minute and needs torch. With --send
    one process prefills a prompt and writes its pages straight into the memory of
    another one, which must generate the same tokens as one process alone.

    Args:
        models: Store the caches of models instead; needs kvdock-transformers.
        send: Send the caches of models to another process instead; needs the same.
        model: With --models or --send, one kind: mha, mla, swa or mamba.
        backend: The backend to use; else the first that keeps a directory, or with
            --send the first that declares direct transfer. One that needs a server
            may bring one for as long as this runs.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        dir: Where to keep the store; else in a temporary directory.
        size: With --models or --send, how large they are: demo or tiny.
        json: Print one line of JSON.
    """
    kind = _SEND if send else _MODELS if models or model or size else ""
    other = _other_demo(kind).of(model, size) if kind else None
    from kvdock_cli.demo import trial  # noqa: PLC0415 - other commands need no demo

    dock = Dock.load(require=(backend,) if backend else ())
    choose = other.choose if other else trial.choose
    chosen, why = choose(dock, backend)
    plugin = dock.backends[chosen]
    path = plugin.manifest.path_setting
    settings = dict(backend_settings(chosen, set_))
    if path in settings_of(set_):
        raise SettingsError(
            f"--set {path} is not for the demo, which has a store of its own",
            fix="Name a directory with --dir, or leave it out.",
        )
    settings.pop(path, None)
    style = style_of(sys.stderr if json else None)
    try:
        if dir is not None:
            dir.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(
                # What models leave in a directory of the user's stays there.
                prefix="kvdock-demo-",
                dir=None if other else dir,
            ) as folder,
            served(chosen, settings) as (given, notice),
            progress.shown("starting") as bar,
        ):
            own = {path: given.get(path, str(Path(folder) / "store"))} if path else {}
            whole = {**given, **own}
            # What is wrong already is reported here, and not by a process that fails.
            if send:
                plugin.settings(whole)
            else:
                require_ready(plugin, whole, _ADVICE if path else "")
            if other:
                screen = _Screen(bar, style, _complain if json else say)
                found = other.run(
                    dir or Path(folder), chosen, why, notice, given, screen
                )
                seconds = time.monotonic() - bar.began_s
                screen.say(report.outcome_text(found, seconds, style))
                if json:
                    return emit("", found.data, as_json=True)
                return PROBLEM if found.failed else FINE
            if not json:
                where = str(dir or "a temporary directory") if path else ""
                say(report.head_text(chosen, where, notice, style))
            job = trial.Job(
                backend=chosen,
                settings=whole,
                directory=Path(str(own[path])).parent if path else None,
                converted=plugin.settings(whole),
            )

            def announce(what: str) -> None:
                bar.label = what

            steps = list(trial.run_trial(job, announce))
    except BrokenPipeError:
        raise  # the user reads no further
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (KvdockError if full else SettingsError)(
            f"--dir {dir or tempfile.gettempdir()} cannot be written: "
            f"{error.strerror or error}",
            fix="Free some space there, or name another directory with --dir.",
        ) from error
    text = "\n" + report.as_text(steps, trial.DAMAGED, style)
    data = report.as_data(chosen, steps, trial.DAMAGED, notice)
    return emit(text, data, as_json=json)


def _other_demo(kind: str) -> Any:  # noqa: ANN401 - of another distribution
    for candidate in list_entry_points(GROUP):
        if candidate.name == kind:
            return import_entry_point(candidate)
    raise UsageProblem(
        "no distribution is installed that brings models for the demo",
        fix="Try: pip install kvdock-transformers",
    )


def _complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@attrs.frozen
class _Screen:
    """Where a demo of another distribution shows what it does.

    Args:
        bar: The line that does not stay.
        style: How to show the others.
        write: Prints them.
    """

    bar: progress.Progress
    style: Style
    write: Callable[[str], None]

    def say(self, text: str, tone: str = "") -> None:
        """Print lines, in a tone."""
        shown = self.style.paint(text, Tone[tone.upper()] if tone else None)
        with self.bar.hidden():
            self.write(shown)

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show what is being done, and how much of it is done."""
        self.bar.label, self.bar.done, self.bar.total = what, done, total
