"""A pytest plugin that records each test as it runs.

One line of JSON as soon as a test begins and one when it is done: where a
backend takes the process with it, the last line says in which test.
"""

from __future__ import annotations

import ctypes
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kvdock.testing.subprocess import OPTION

_PR_SET_PDEATHSIG = 1
"""Linux: which signal to get when the parent ends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption(OPTION, default="", help="file for kvdock's record of tests")


def pytest_configure(config: pytest.Config) -> None:
    """Start the recorder if a file is named, until the parent ends."""
    path = config.getoption(OPTION)
    if path:
        # In its own session it would outlive the process that started it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        config.pluginmanager.register(Recorder(Path(path)))


class Recorder:
    """Writes one line for each thing that happens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _write(self, **words: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say how many there are."""
        self._write(event="collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say why nothing could be collected."""
        if report.failed:
            self._write(event="broken", why=str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which one begins."""
        self._write(event="began", test=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Any:  # noqa: ANN401 - a generator that pluggy drives
        """Say how one ended."""
        outcome = yield
        report: pytest.TestReport = outcome.get_result()
        if report.when != "call" and report.passed:
            return
        words: dict[str, object] = {
            "event": report.outcome,
            "test": item.nodeid,
            "suite": getattr(getattr(item, "cls", None), "__name__", ""),
            "name": getattr(item, "originalname", item.name),
            "when": report.when,
            "seconds": round(report.duration, 4),
        }
        if hasattr(report, "wasxfail"):
            words |= {"event": "xfailed", "why": report.wasxfail}
        elif report.skipped and isinstance(report.longrepr, tuple):
            words["why"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed and call.excinfo:
            words |= {
                "raised": call.excinfo.typename,
                "why": str(call.excinfo.value).split("\nassert ")[0].strip(),
                "where": _blamed(item, call.excinfo.value),
            }
        self._write(**words)


def _blamed(item: pytest.Item, error: BaseException) -> str:
    """Return the line of the plugin that an error leads to, or ""."""
    suite: Any = getattr(item, "cls", None)
    if not hasattr(suite, "blame"):
        return ""
    try:
        found: str = suite.blame(error)
    except Exception:  # noqa: BLE001 - the failure itself must be recorded
        return ""
    return found
