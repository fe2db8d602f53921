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
    """
    from kvdock import Dock, KvdockError  # noqa: PLC0415
    from kvdock_transformers.backends import choose  # noqa: PLC0415
    from kvdock_transformers.families import Family, Scale  # noqa: PLC0415
    from kvdock_transformers.presentation import Display, as_object  # noqa: PLC0415
    from kvdock_transformers.trial import Request, run_trial  # noqa: PLC0415

    try:
        chosen = choose(Dock.load(require=(backend,) if backend else ()), backend)
    except KvdockError as error:
        raise typer.BadParameter(str(error), param_hint="--backend") from error
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--dir") from error
    families = tuple(Family) if model is Model.ALL else (Family(model),)
    display = Display(to_stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="kvdock-demo-") as temporary:
        request = Request(
            families=families,
            directory=directory or Path(temporary),
            backend=chosen,
            scale=Scale(size),
        )
        try:
            with display:
                display.begin(request)
                results = run_trial(request, display.show)
        except KvdockError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(1) from error
    display.end(results)
    if as_json:
        typer.echo(as_object(results))
    if not all(result.ok for result in results):
        raise typer.Exit(1)
