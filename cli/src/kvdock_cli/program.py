"""The command line as typer reads it: wiring only."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvdock_cli import output
from kvdock_cli.registry import CommandGroup
from kvdock_cli.typer_adapter import CONTEXT, Help, ParserError

COMPLETE = "_KVDOCK_COMPLETE"
"""Set by the script of `kvdock completion` to ask for completions."""


def _finish(code: int | None, **_: object) -> None:
    """Make what a command returned the exit code."""
    raise typer.Exit(code or 0)


app = typer.Typer(
    name="kvdock",
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_finish,
    no_args_is_help=True,
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def kvdock(
    context: typer.Context,
    *,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Name every part with version and path."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: JSON.")] = False,
    help: Help = False,  # noqa: A002 - the option's name
) -> None:
    """Storage for an LLM engine's KV cache, through plugins."""
    del help
    if version:
        from kvdock_cli.commands.version import versions  # noqa: PLC0415 - seldom asked for

        raise typer.Exit(versions(json=json))
    if context.invoked_subcommand is None:
        raise output.UsageProblem("no command was given", fix="See `kvdock --help`.")


def run(program: typer.Typer, *, as_json: bool) -> object:
    """Run the command that was given; return its exit code, or its last words."""
    if COMPLETE in os.environ:
        # A shell asks for words: typer's own switch would add two options.
        from typer.completion import completion_init  # type: ignore[attr-defined] # noqa: PLC0415 - see above

        completion_init()
    try:
        return program(prog_name=program.info.name, standalone_mode=False) or 0
    except ParserError as error:
        return output.fail_usage(error, as_json=as_json)
    except typer.Abort:
        return output.INTERRUPTED
