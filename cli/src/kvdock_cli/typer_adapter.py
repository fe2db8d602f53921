"""Turn a plain function into what typer reads.

A distribution that adds a command need not import typer: the names, the
annotations and the docstring of its function say everything.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

import typer

from kvdock.config import as_path
from kvdock_cli.output import say

CONTEXT = {"help_option_names": ["--help", "-h"], "max_content_width": 120}
"""Settings of every command: both spellings of help, and lines that use the
terminal's width up to where they are hard to read."""

ParserError: type[Exception] = typer.BadParameter.__mro__[2]
"""The root of what typer raises for a command line that it cannot read."""

_SHORT = {"verbose": "-v"}
"""Options that have a letter."""

_SECTION = re.compile(r"^[A-Z]\w+:\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+):\s*(.*(?:\n {5,}.*)*)", re.MULTILINE)


def _show_help(context: typer.Context, asked: bool) -> None:  # noqa: FBT001 - typer's own
    if asked:
        say(context.get_help())
        raise typer.Exit


Help = Annotated[
    bool,
    typer.Option(
        "--help",
        "-h",
        is_eager=True,
        callback=_show_help,
        help="Show this message and exit.",
    ),
]
"""An option in place of typer's own, whose default of None makes typer import
pydantic to read it: 60 ms that `kvdock list` does not have."""


def path(text: str) -> Path:
    """Read a path that is given on the command line."""
    return as_path(text)


def described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Read a Google docstring.

    Returns:
        What stands before its first section, and the text for each argument.
    """
    text = inspect.getdoc(function) or ""
    about = _SECTION.split(text)[0].strip()
    _, _, arguments = text.partition("Args:\n")
    arguments = _SECTION.split(arguments)[0]
    return about, {
        name: " ".join(words.split()) for name, words in _ENTRY.findall(arguments)
    }


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature that typer wants.

    A parameter before `/`, or one without a default, is an argument; every
    other one is an option. A trailing underscore (`set_`) is left out of the
    option's name, and a flag that is False by default has no `--no-` twin.
    """
    about, helps = described(function)
    given = inspect.signature(function, eval_str=True)
    parameters = [
        _adapted(parameter, helps.get(parameter.name, ""))
        for parameter in given.parameters.values()
    ]

    parameters.append(
        inspect.Parameter(
            "help", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Help
        )
    )

    def call(**values: Any) -> Any:  # noqa: ANN401 - the signature of any command
        bound = given.bind_partial()
        for name, parameter in given.parameters.items():
            value = values[name]
            several = get_origin(parameter.annotation) is tuple
            bound.arguments[name] = tuple(value or ()) if several else value
        return function(*bound.args, **bound.kwargs)

    facade: Any = call
    facade.__doc__ = about
    facade.__signature__ = given.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    facade.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _adapted(parameter: inspect.Parameter, text: str) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        annotation = str
    metavar = None
    if get_origin(annotation) is tuple and get_args(annotation)[1:] == (...,):
        # typer gives several values as a list only.
        one = get_args(annotation)[0]
        metavar = f"<{getattr(one, '__name__', one)}>"
        annotation = GenericAlias(list, one)
    before = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    bare = parameter.default is inspect.Parameter.empty
    if before or (bare and parameter.kind is not keyword):
        info: Any = typer.Argument(
            help=text, show_default=parameter.default is not None
        )
    else:
        flags = ["--" + parameter.name.rstrip("_").replace("_", "-")]
        flags += [short for name, short in _SHORT.items() if name == parameter.name]
        info = typer.Option(*flags, help=text, metavar=metavar)
    if Path in (annotation, *get_args(annotation)):
        # typer's own would read an empty path as the current directory.
        info.parser = path
    return parameter.replace(kind=keyword, annotation=Annotated[annotation, info])
