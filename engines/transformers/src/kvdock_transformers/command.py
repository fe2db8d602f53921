"""The `demo` command, which the command line finds by its entry point.

Loading this module must stay cheap: `kvdock --help` and `kvdock list` load
every command. Torch is imported in the worker processes alone, and what this
process needs only once the command runs.
"""

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
        typer.Option("--dir", help="Where to keep the store; else a temporary one."),
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
    from kvdock import Dock, KvdockError  # noqa: PLC0415
    from kvdock_transformers.backends import (  # noqa: PLC0415
        Settings,
        check_settings,
        choose,
        configured,
        served,
    )
    from kvdock_transformers.families import Family, Scale  # noqa: PLC0415
    from kvdock_transformers.presentation import Display, as_object  # noqa: PLC0415
    from kvdock_transformers.trial import Request, run_trial  # noqa: PLC0415

    given: Settings = _settings(set_ or [])
    try:
        dock = Dock.load(require=(backend,) if backend else ())
        chosen = choose(dock, backend)
    except KvdockError as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    try:
        given = configured(dock, chosen, given)
        check_settings(dock, chosen, given)
    except KvdockError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--dir") from error
    families = tuple(Family) if model is Model.ALL else (Family(model),)
    display = Display(to_stderr=as_json)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvdock-demo-") as temporary,
            served(chosen, given) as (settings, notice),
            display,
        ):
            request = Request(
                families=families,
                directory=directory or Path(temporary),
                backend=chosen,
                scale=Scale(size),
                settings=settings,
            )
            display.begin(request, notice)
            results = run_trial(request, display.show)
    except KvdockError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    display.end(results)
    if as_json:
        typer.echo(as_object(results))
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _settings(pairs: list[str]) -> dict[str, str]:
    """Read what is given as KEY=VALUE."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or key in found:
            why = "is given twice" if key in found else "is not KEY=VALUE"
            raise typer.BadParameter(f"{pair!r} {why}", param_hint="--set")
        found[key] = value
    return found
