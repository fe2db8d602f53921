from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvdock.plugin import COMMANDS_GROUP, list_entry_points
from kvdock_cli import registry

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
    assert "Say hello." in squeezed(shelf.kvdock("greet", "--help").stdout)


def test_what_a_command_returns_is_the_exit_code(shelf: Shelf) -> None:
    add(shelf, "greet")
    assert shelf.kvdock("greet", "--code", "1").returncode == 1


def test_a_mapping_is_a_command_with_subcommands(shelf: Shelf) -> None:
    add(shelf, "both")
    assert shelf.kvdock("greet", "greet", "--code", "1").returncode == 1
    shown = squeezed(shelf.kvdock("greet", "--help").stdout)
    assert "Words for people." in shown
    assert "fail Stop." in squeezed(shelf.kvdock("greet", "--help").stdout)
    assert shelf.kvdock("greet", "-h").stdout == shelf.kvdock("greet", "--help").stdout


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
    assert "greet A command of kvdock-greet 1.2.3." in squeezed(shown.stdout)
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


MODULES = """
import sys
from kvdock_cli.main import main
try:
    main()
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""
COMPLETING = {"COMP_WORDS": "kvdock ", "COMP_CWORD": "1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "absent"),
    [
        (["--version"], {}, {"typer", "kvdock.plugin.hookspecs"}),
        (["--help"], {}, {"kvdock_cli.commands.list"}),
        ([], {"_KVDOCK_COMPLETE": "complete_bash"}, {"kvdock_cli.commands.list"}),
    ],
    ids=["version", "help", "completion"],
)
def test_what_is_asked_most_loads_no_numpy_and_no_plugin(
    shelf: Shelf, arguments: list[str], environ: dict[str, str], absent: set[str]
) -> None:
    shelf.add_backend("good")
    add(shelf, "greet")
    done = subprocess.run(
        [sys.executable, "-c", MODULES, *arguments],
        env=os.environ | {"PYTHONPATH": str(shelf.root)} | COMPLETING | environ,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "greet" in done.stdout) == (0, True)
    heavy = {"numpy", "importlib.metadata", "kvdock_good", "kvdock_greet"}
    assert not (heavy | absent) & set(done.stderr.split())


def test_the_help_says_what_metadata_says_of_a_stranger(shelf: Shelf) -> None:
    add(shelf, "greet")
    (info,) = shelf.root.glob("*.dist-info")
    metadata = info / "METADATA"
    metadata.write_text(
        metadata.read_text() + "Summary: Greets people.\n\nSummary: no\n"
    )
    shown = squeezed(shelf.kvdock("--help").stdout).strip()
    assert shown.endswith("greet Greets people.")


def test_the_help_says_of_each_of_our_commands_what_it_says_itself() -> None:
    own = [
        one
        for one in list_entry_points(COMMANDS_GROUP)
        if one.distribution == "kvdock-cli"
    ]
    assert len(own) > 10
    group = registry.CommandGroup(name="kvdock")
    for candidate in own:
        listed = group.get_command(None, candidate.name).get_short_help_str(1000)
        assert listed == registry.load(candidate).get_short_help_str(1000)
        assert listed.endswith(".")


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
