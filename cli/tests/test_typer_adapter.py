from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvdock_cli.typer_adapter import adapted, described


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


def run(function: Any, *arguments: str) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("it")(adapted(function))
    return CliRunner().invoke(app, list(arguments))


def every_kind(
    name: str,
    where: Path = Path("here"),
    /,
    *,
    must: int,
    colour: Colour = Colour.RED,
    set_: tuple[str, ...] = (),
    max_keys: float = 1.5,
    loud: bool = False,
) -> None:
    """Show everything.

    More about it.

    Args:
        name: Whom it is
            about.
        where: A place.
        must: Needed.
        set_: A setting.

    Returns:
        Nothing.
    """
    print((name, where, must, colour, set_, max_keys, loud))  # noqa: T201 - seen by the test


def test_a_plain_signature_becomes_arguments_and_options() -> None:
    result = run(
        every_kind, "me", "there", "--must", "3", "--colour", "blue", "--loud",
        "--set", "a=1", "--set", "b=2", "--max-keys", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    expected = ("me", Path("there"), 3, Colour.BLUE, ("a=1", "b=2"), 2.0, True)
    assert result.output == f"{expected}\n"


def test_what_has_a_default_may_be_left_out() -> None:
    result = run(every_kind, "me", "--must", "3")
    assert result.output == f"{('me', Path('here'), 3, Colour.RED, (), 1.5, False)}\n"


@pytest.mark.parametrize("arguments", [["--must", "3"], ["me"], ["me", "--must", "x"]])
def test_what_has_none_is_required_and_typed(arguments: list[str]) -> None:
    assert run(every_kind, *arguments).exit_code == 2


def test_the_help_is_the_docstring() -> None:
    shown = run(every_kind, "--help").output
    assert "Show everything.\n\n  More about it.\n" in shown
    assert "Whom it is about." in shown
    assert "Nothing" not in shown
    assert "--no-loud" not in shown


def test_a_function_without_a_docstring_is_described_by_nothing() -> None:
    assert described(lambda: None) == ("", {})
