"""Fixtures that the tests of several distributions share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_try
from tiny import Shelf

# Millions of objects of collected tests are never freed. Each test that collects
# garbage would walk over all of them: seconds for what takes milliseconds.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Let .ci/run repeat what failed once."""
    second_try.configure(config, config.rootpath)


def pytest_collection_finish() -> None:
    """Leave what was collected where it is."""
    gc.collect()
    gc.freeze()
    gc.enable()


# Before pytest drops what its `-m` does not name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make tests of the kit slow and long that a class repeats after another one.

    Raises:
        pytest.UsageError: If a name is of no group and no test of the class.
    """
    for item in items:
        repeated = {name for one in item.iter_markers("repeats") for name in one.args}
        if not repeated or not isinstance(item, pytest.Function):
            continue
        groups = {one.__name__: vars(one) for one in item.cls.__mro__}
        for name in repeated:
            if name not in groups and not hasattr(item.cls, name):
                raise pytest.UsageError(f"{item.nodeid} repeats nothing named {name}")
        name = item.originalname
        if name in repeated or any(name in groups.get(one, ()) for one in repeated):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which numbers of tests/budgets could be lowered."""
    lines = [
        line
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, line in report.user_properties
        if name == "budgets"
    ]
    if lines:
        terminalreporter.section("budgets: make budgets lowers them")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """An empty shelf that this process and its children look on."""
    root = tmp_path / "shelf"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delenv("KVDOCK_PLUGINS", raising=False)
    yield Shelf(root)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(root)):
            del sys.modules[name]
