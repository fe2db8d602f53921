from __future__ import annotations

import json

import pytest

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
    print("hello", name, "typer.testing" in sys.modules)
    return code

def fail(*, json: bool = False) -> None:
    """Stop."""
    raise KvdockError("no way", fix="Turn back.")

def refuse() -> None:
    """Refuse a setting."""
    raise SettingsError("unknown setting")

both = {"greet": greet, "fail": fail}
'''


@pytest.fixture
def greeting(shelf):  # type: ignore[no-untyped-def] - conftest's class
    shelf.add("greet", GREET, group="kvdock.commands", attribute="greet")
    return shelf


def test_a_function_of_another_distribution_is_a_command(greeting) -> None:  # type: ignore[no-untyped-def] - conftest's class
    done = greeting.kvdock("greet", "world")
    assert (done.stdout, done.stderr, done.returncode) == ("hello world False\n", "", 0)
    assert "greet   Say hello." in greeting.kvdock("--help").stdout
