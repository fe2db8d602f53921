"""The command line of the demos; its looks and its ends are those of `kvdock`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import typer

from kvdock import Dock
from kvdock_cli.commands.demo import prepared
from kvdock_cli.main import main
from kvdock_cli.output import FINE, PROBLEM, emit, say
from kvdock_cli.reports._report import Report
from kvdock_cli.reports._style import Style, Tone
from kvdock_cli.reports._tables import Cell, table
from kvdock_cli.terminal import style_of
from kvdock_cli.typer_adapter import CONTEXT, adapted
from model_demo.command import SendingDemo, StoringDemo

if TYPE_CHECKING:
    from kvdock_cli import progress
    from model_demo.report import Outcome

_TONES = {"ok": Tone.GOOD, "NO": Tone.BAD, "FAILED": Tone.BAD}


def run() -> None:
    """Run the command line, and end the process."""
    program = typer.Typer(
        name="examples/models",
        add_completion=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    program.command()(adapted(models))
    main(program)


def models(
    *,
    send: bool = False,
    model: str = "",
    backend: str = "",
    set_: tuple[str, ...] = (),
    dir: Path | None = None,  # noqa: A002 - the word for it
    size: str = "",
    json: bool = False,
) -> int:
    """Store caches of models, end the process, restore them in a new one, damage some.

    Takes about a minute. One process prefills a prompt, stores the pages of every pool
    and ends; the next restores them and must generate the very same; then stored
    pages are damaged, and another one must notice. With --send one process prefills a
    prompt and writes its pages straight into the memory of another one, which must
    generate the same tokens as one process alone.

    Args:
        send: Send the caches to another process instead of storing them.
        model: One kind: mha, mla, swa or mamba; else all of them.
        backend: The backend to use; else the first that keeps a directory, or with
            --send the first that declares peers. One that needs a server
            may bring one for as long as this runs.
        set_: A setting of it, as KEY=VALUE; may be given several times.
        dir: Where to keep the store; else in a temporary directory.
        size: How large the models are: demo or tiny.
        json: Print one line of JSON.
    """
    demo = (SendingDemo if send else StoringDemo).of(model, size)
    dock = Dock.load(require=(backend,) if backend else ())
    chosen, why = demo.choose(dock, backend)
    plugin = dock.backends[chosen]
    path = plugin.manifest.path_setting
    style = style_of(sys.stderr if json else None)
    with prepared(plugin, path, set_, dir, stores=not send) as ready:
        screen = _Screen(ready.bar, style, _complain if json else say)
        place = dir or ready.folder
        found = demo.run(place, chosen, why, ready.notice, ready.given, screen)
        screen.say(_outcome_text(found, time.monotonic() - ready.bar.began_s, style))
        if json:
            schema = str(found.data["schema"])
            return emit(
                Report(schema, found.data, (), ok=not found.failed), as_json=True
            )
        return PROBLEM if found.failed else FINE


def _outcome_text(found: Outcome, seconds: float, style: Style) -> str:
    """Render the results: tables, and claims that failed."""
    lines = []
    for one in found.tables:
        rows = [[Cell(text, _TONES.get(text)) for text in row] for row in one.rows]
        lines += ["", style.paint(one.title, Tone.STRONG)]
        lines += table(one.headings, rows, style)
    lines += ["", *(style.paint(line, Tone.BAD) for line in found.failed)]
    verdict = "FAILED" if found.failed else "all as it should be"
    return "\n".join([*lines, f"{verdict}, {seconds:.0f} s in all"])


def _complain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@attrs.frozen
class _Screen:
    """Where a demo shows what it does.

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
