from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import Shelf

GREET = '''
"""Words for people.

And more."""
import sys
from kvdock import KvdockError
from kvdock.errors import SettingsError


def greet(name: str = "you", /, *, code: int = 0, json: bool = False) -> int:
    """Say hello.

    Args:
        name: Whom to greet.
    """
    print("hello", name)
    return code


def fail(*, json: bool = False) -> None:
    """Stop."""
    raise KvdockError("no way", fix="Turn back.")


def refuse() -> None:
    """Refuse a setting."""
    raise SettingsError("unknown setting")


both = {"greet": greet, "fail": fail}
'''


def squeezed(text: str) -> str:
    """Columns move with the longest name of what is installed."""
    return " ".join(text.split())


def add(shelf: Shelf, attribute: str, source: str = GREET, name: str = "greet") -> None:
    shelf.add(name, source, group="kvdock.commands", attribute=attribute)


def test_a_function_of_another_distribution_is_a_command(shelf: Shelf) -> None:
    add(shelf, "greet")
    done = shelf.kvdock("greet", "world")
    assert (done.stdout, done.stderr, done.returncode) == ("hello world\n", "", 0)
    assert "greet Say hello." in squeezed(shelf.kvdock("--help").stdout)


def test_what_a_command_returns_is_the_exit_code(shelf: Shelf) -> None:
    add(shelf, "greet")
    assert shelf.kvdock("greet", "--code", "1").returncode == 1


def test_a_mapping_is_a_command_with_subcommands(shelf: Shelf) -> None:
    add(shelf, "both")
    assert shelf.kvdock("greet", "greet", "--code", "1").returncode == 1
    assert "greet Words for people." in squeezed(shelf.kvdock("--help").stdout)
    assert "fail Stop." in squeezed(shelf.kvdock("greet", "--help").stdout)
    assert shelf.kvdock("greet", "-h").stdout == shelf.kvdock("greet", "--help").stdout


def test_a_typer_application_is_a_command_with_subcommands(shelf: Shelf) -> None:
    source = GREET + (
        "import typer\napp = typer.Typer(help='An app.')\n"
        "@app.command()\ndef one():\n    '''Do one thing.'''\n    return 1\n"
    )
    add(shelf, "app", source)
    assert shelf.kvdock("greet", "one").returncode == 1
    assert "greet An app." in squeezed(shelf.kvdock("--help").stdout)


def test_an_error_is_one_line_and_one_object(shelf: Shelf) -> None:
    add(shelf, "fail")
    done = shelf.kvdock("greet")
    assert (done.stdout, done.returncode) == ("", 1)
    assert done.stderr == "kvdock: no way. Turn back.\n"
    done = shelf.kvdock("greet", "--json")
    assert json.loads(done.stdout) == {
        "schema": "kvdock.error/1",
        "ok": False,
        "error": {"type": "KvdockError", "what": "no way", "fix": "Turn back."},
    }
    assert done.returncode == 1


def test_a_wrong_setting_is_a_usage_error(shelf: Shelf) -> None:
    add(shelf, "refuse")
    assert shelf.kvdock("greet").returncode == 2


def test_an_unknown_command_names_the_nearest(shelf: Shelf) -> None:
    done = shelf.kvdock("lst")
    assert done.returncode == 2
    assert done.stderr == "kvdock: unknown command 'lst'. Did you mean 'list'?\n"


@pytest.mark.parametrize(
    ("source", "attribute", "reason"),
    [
        ("import nowhere", "greet", "No module named 'nowhere'"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("def greet(a: 'Nowhere'): pass", "greet", "'Nowhere' is not defined"),
                ("import sys; sys.exit(3)", "greet", "SystemExit: 3"),
                ("", "greet", "has no attribute 'greet'"),
                ("class greet: pass", "greet", "is not a function"),
                ("greet = 3", "greet", "3 is not a function"),
            )
        ),
    ],
    ids=["import", "annotation", "exit", "attribute", "class", "value"],
)
def test_a_broken_command_says_why_and_stops_no_other(
    shelf: Shelf, source: str, attribute: str, reason: str
) -> None:
    add(shelf, attribute, source)
    done = shelf.kvdock("greet", "--any", "thing")
    assert done.returncode == 1
    assert reason in done.stderr
    assert "kvdock-greet 1.2.3" in done.stderr
    assert "Traceback" not in done.stderr
    shown = shelf.kvdock("--help")
    assert reason in squeezed(shown.stdout)
    assert shown.returncode == 0
    assert shelf.kvdock("list").returncode == 0


def test_of_two_commands_with_one_name_neither_runs(shelf: Shelf) -> None:
    add(shelf, "greet")
    shelf.add(
        "greet",
        GREET,
        group="kvdock.commands",
        attribute="greet",
        distribution="kvdock-rival",
    )
    done = shelf.kvdock("greet")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "kvdock-greet (kvdock_greet:greet)" in done.stderr
    assert "kvdock-rival (kvdock_rival:greet)" in done.stderr


def test_only_the_command_that_is_asked_for_is_imported(shelf: Shelf) -> None:
    add(shelf, "greet", "print('imported')\n" + GREET)
    assert "imported" not in shelf.kvdock("list").stderr
    assert "imported" in shelf.kvdock("greet").stderr


def test_a_defect_of_a_command_shows_its_traceback(shelf: Shelf) -> None:
    add(shelf, "greet", "def greet():\n    1 / 0\n")
    assert "ZeroDivisionError" in shelf.kvdock("greet").stderr


def test_the_example_of_the_documentation_is_a_command(shelf: Shelf) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text()
    example, doctor, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    add(shelf, "greet", example)
    help_text = squeezed(shelf.kvdock("greet", "--help").stdout)
    assert "--loud In capitals." in help_text
    assert shelf.kvdock("greet", "me", "--dir", "/", "--loud").returncode == 0
    shelf.add("example", doctor, group="kvdock.doctors", attribute="examine")
    assert "no example here" in shelf.kvdock("doctor", "example").stdout
