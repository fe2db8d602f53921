"""Run the contract in an author's own pytest: `pytest --kvdock-backend NAME`.

Loaded by `-p kvdock.testing.pytest_plugin`, on the command line or in `addopts`.
"""

from __future__ import annotations

import os

import pytest

from kvdock.testing.report import SUITES, VARIABLE, spelled_words


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name a backend and its settings."""
    group = parser.getgroup("kvdock", "the contract of kvdock's backends")
    group.addoption(
        "--kvdock-backend",
        default="",
        metavar="NAME",
        help="run the contract on this installed backend, and nothing else",
    )
    for option, what in (("set", "a setting"), ("small", "a setting of a small store")):
        group.addoption(
            f"--kvdock-{option}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"{what}; may be given several times",
        )
    group.addoption(
        "--kvdock-scale",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="how many times slower than a local store it is",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the contract if a backend is named."""
    name = config.getoption("--kvdock-backend")
    if name:
        small = _settings(config, "small")
        os.environ[VARIABLE] = spelled_words(
            name,
            _settings(config, "set"),
            small=small or None,
            scale=config.getoption("--kvdock-scale"),
        )
        config.option.pyargs = True
        config.args = [f"{SUITES}::TestContract"]


def _settings(config: pytest.Config, option: str) -> dict[str, object]:
    """Return settings from KEY=VALUE."""
    found: dict[str, object] = {}
    for given in config.getoption(f"--kvdock-{option}"):
        key, equals, value = given.partition("=")
        if not (key and equals):
            raise pytest.UsageError(f"--kvdock-{option} {given!r} is not KEY=VALUE")
        found[key] = value
    return found
