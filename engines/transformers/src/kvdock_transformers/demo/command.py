"""The `demo` command, which the command line finds by its entry point.

Loading this module must stay cheap: `kvdock --help` and `kvdock list` load
every command. Torch is imported in the worker processes alone, and what this
process needs only once the command runs.
"""

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvdock.config import as_path

if TYPE_CHECKING:
    from kvdock_transformers.families import Family, Scale


class Model(StrEnum):
    """Which models to run: one family, or all of them."""

    ALL = "all"
    MHA = "mha"
    MLA = "mla"
    SWA = "swa"
    MAMBA = "mamba"


class Size(StrEnum):
    """How large the models are."""

    DEMO = "demo"
    TINY = "tiny"


def demo(
    model: Annotated[Model, typer.Option(help="Which kind of model.")] = Model.ALL,
    backend: Annotated[
        str, typer.Option(help="Which backend keeps the pages; else the first fit.")
    ] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the backend, as KEY=VALUE."),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            parser=as_path,
            metavar="<path>",
            help="Where to keep the store; else a temporary one.",
        ),
    ] = None,
    as_json: Annotated[  # noqa: FBT002 - a command's flag
        bool,
        typer.Option("--json", help="Print one JSON object; all else to stderr."),
    ] = False,
    size: Annotated[Size, typer.Option(hidden=True)] = Size.DEMO,
) -> None:
    """Store a prompt's pages, end the process, restore them in a new one.

    Makes tiny models on the spot and downloads nothing. One process prefills a
    long prompt, stores the pages of every pool and ends. The next restores
    them and must generate the very same; a third recomputes for comparison.
    Then stored pages are damaged, and the last must notice and repair.

    A backend that needs a server may bring one for as long as this runs. What
    `--set` does not say is taken from kvdock's file and environment, except for
    the directory.
    """
    from kvdock import Dock  # noqa: PLC0415
    from kvdock_transformers.backends import (  # noqa: PLC0415
        Settings,
        check_room,
        check_settings,
        choose,
        configured,
        served,
    )
    from kvdock_transformers.demo.presentation import Display, as_object  # noqa: PLC0415
    from kvdock_transformers.demo.trial import Request, run_trial  # noqa: PLC0415
    from kvdock_transformers.families import Family, Scale  # noqa: PLC0415

    given: Settings = pairs_of(set_ or [])
    dock = Dock.load(require=(backend,) if backend else ())
    chosen = choose(dock, backend)
    given = configured(dock, chosen, given)
    check_settings(dock, chosen, given)
    if directory is not None:
        check_writable(directory)
    families = tuple(Family) if model is Model.ALL else (Family(model),)
    display = Display(to_stderr=as_json)
    with (
        cleaning_up_when_terminated(),
        tempfile.TemporaryDirectory(prefix="kvdock-demo-") as temporary,
        served(chosen, given) as (settings, notice),
        display,
    ):
        where = directory or Path(temporary)
        check_room(dock, chosen, where, settings)
        request = Request(
            families=families,
            directory=where,
            backend=chosen,
            scale=Scale(size),
            settings=settings,
        )
        display.begin(request, notice)
        results = run_trial(request, display.show)
    display.end(results)
    if as_json:
        typer.echo(as_object(results))
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def demo_of(
    *,
    model: str,
    backend: str,
    set_: list[str],
    directory: Path | None,
    as_json: bool,
    size: str,
) -> None:
    """Run the demo as the command line asks for it; "" stands for the default.

    Entry point `models` of the group `kvdock.demos`.

    Raises:
        SettingsError: If there is no such model or size.
    """
    kind, scale = _words_of(model, size)
    demo(kind, backend, set_, directory, as_json, scale)


def models_of(model: str, size: str) -> "tuple[tuple[Family, ...], Scale]":
    """Return the models that a word stands for, and their size; "" is the default.

    Raises:
        SettingsError: If there is no such model or size.
    """
    from kvdock_transformers.families import Family, Scale  # noqa: PLC0415

    kind, scale = _words_of(model, size)
    families = tuple(Family) if kind is Model.ALL else (Family(kind),)
    return families, Scale(scale)


def _words_of(model: str, size: str) -> tuple[Model, Size]:
    from kvdock.errors import SettingsError  # noqa: PLC0415

    try:
        return Model(model or Model.ALL), Size(size or Size.DEMO)
    except ValueError as error:
        raise SettingsError(
            str(error), fix=f"Models: {', '.join(Model)}; sizes: {', '.join(Size)}."
        ) from error


@contextlib.contextmanager
def cleaning_up_when_terminated() -> Iterator[None]:
    """Leave no process and no file behind where SIGTERM ends this one."""

    def leave(number: int, _: object) -> None:
        # A second Ctrl-C must not interrupt the clean-up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_writable(directory: Path) -> None:
    """Raise if a directory cannot be made, or written to.

    Raises:
        SettingsError: With what is wrong.
    """
    from kvdock.errors import SettingsError  # noqa: PLC0415

    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise SettingsError(
            f"--dir {directory} cannot be written to: {error.strerror}"
        ) from error


def pairs_of(pairs: list[str]) -> dict[str, str]:
    """Read what is given as KEY=VALUE.

    Raises:
        SettingsError: If it is not, or a key is given twice.
    """
    from kvdock.errors import SettingsError  # noqa: PLC0415

    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in found:
            why = "is given twice" if key in found else "is not KEY=VALUE"
            raise SettingsError(f"--set {pair!r} {why}")
        found[key] = value
    return found
