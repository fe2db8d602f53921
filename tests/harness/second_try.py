"""Repeat what failed once in a run of many suites, alone and at its end.

`.ci/run` names a folder for each suite in `TESTS_OF_KVDOCK_FAILURES`: a session writes
there what failed, and how to run it. The last session gets all of these folders in
`TESTS_OF_KVDOCK_SECOND_TRY`: when its own tests are done, it repeats each failed one in
a process of its own. What passes is listed as flaky, above the closing line and in
`build/flaky.txt`; what fails again fails the session.

`python tests/harness/second_try.py FOLDER` answers by its status whether nothing went
wrong in a suite but tests that may be repeated.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FAILURES = "TESTS_OF_KVDOCK_FAILURES"
SECOND_TRY = "TESTS_OF_KVDOCK_SECOND_TRY"
ONCE = re.compile(
    r"wrong|damag|corrupt|torn_|mutat|mutant|checksum|integrity|seal|salt|tenant|identit"
    r"|kill|crash|dies|died|torture|late_write|late_byte|contract/(late|races)"
)
"""What the name of a test, its file, or the file of the kit that defines it has where
one failure is too many: wrong bytes, kills, tenants and identity."""
MOST = 20
"""More failures than these are no flakes."""
DEADLINE_S = 900.0


CRASHED = "???"
"""When a test failed that took a process of xdist with it."""


def may_repeat(nodeid: str, defined_in: str, when: str | None = "call") -> bool:
    """Return whether a test may fail once."""
    named = ONCE.search(f"{defined_in}::{nodeid}".lower())
    return not named and when != CRASHED


class Failures:
    """Plugin: write what failed in a session, and that it came to its end."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{os.getpid()}.json"
        self._file.touch(mode=0o600)  # a session's environment is private
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self.failed.append(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        written = [
            config.hook.pytest_report_to_serializable(config=config, report=report)
            for report in self.failed
        ]
        for report in written:
            report.pop("node", None)  # the worker of xdist
        record = {
            "status": int(session.exitstatus),
            "python": sys.executable,
            "environment": dict(os.environ),
            "failed": written,
        }
        self._file.write_text(json.dumps(record))


def sessions(folder: Path) -> list[dict[str, Any]]:
    """Return what the sessions of a suite wrote; an unfinished one has no status."""
    texts = [path.read_text() for path in sorted(folder.glob("*.json"))]
    return [json.loads(text) if text else {"failed": []} for text in texts]


def explained(folder: Path) -> bool:
    """Return whether nothing but tests that may be repeated went wrong in a suite."""
    records = sessions(folder)
    failed = [report for record in records for report in record["failed"]]
    return (
        0 < len(failed) <= MOST
        and all(record.get("status") in {0, 1} for record in records)
        and all(
            may_repeat(test["nodeid"], test["location"][0], test["when"])
            for test in failed
        )
    )


class SecondTry:
    """Plugin: repeat at the end of a session what failed in it and in other suites."""

    def __init__(self, folder: Path, listing: Path) -> None:
        self._folder = folder
        self._listing = listing
        self._flaky: list[tuple[str, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Repeat, before the summary is written."""
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        own = terminal.stats.get("failed", []) + terminal.stats.get("error", [])
        tried = [(report, sys.executable, dict(os.environ)) for report in own]
        tried += self._others(session)
        finished = int(session.exitstatus) in {0, 1}
        few = finished and len(tried) <= MOST
        for report, python, environment in tried:
            again = few and may_repeat(report.nodeid, report.location[0], report.when)
            if again and passes(report.nodeid, python, environment):
                self._flaky.append((report.nodeid, report.longreprtext))
                for outcome in ("failed", "error"):
                    if report in terminal.stats.get(outcome, []):
                        terminal.stats[outcome].remove(report)
                terminal.stats.setdefault("flaky", []).append(report)
            elif report not in own:
                terminal.stats.setdefault("failed", []).append(report)
        if finished:
            left = terminal.stats.get("failed") or terminal.stats.get("error")
            session.exitstatus = pytest.ExitCode(int(bool(left)))
        self._listing.parent.mkdir(exist_ok=True)
        self._listing.write_text("".join(self._lines()))

    def _others(
        self, session: pytest.Session
    ) -> Iterator[tuple[pytest.TestReport, str, dict[str, str]]]:
        # A suite in which more went wrong has failed already.
        for folder in filter(explained, sorted(self._folder.glob("*"))):
            for record in sessions(folder):
                for data in record["failed"]:
                    report = session.config.hook.pytest_report_from_serializable(
                        config=session.config, data=data
                    )
                    yield report, record["python"], record["environment"]

    def _lines(self) -> Iterator[str]:
        for nodeid, text in self._flaky:
            yield f"{nodeid}\n"
            yield "".join(f"    {line}\n" for line in text.splitlines())

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        """List what is flaky, with the output of its failure."""
        if self._flaky:
            terminalreporter.section("flaky")
            terminalreporter.write("".join(self._lines()))


def passes(nodeid: str, python: str, environment: Mapping[str, str]) -> bool:
    """Run one test alone; return whether it passes."""
    command = [python, "-m", "pytest", "-q", nodeid]
    command += ["-o", f"faulthandler_timeout={DEADLINE_S:.0f}"]
    try:
        ran = subprocess.run(
            command,
            env=environment,
            timeout=DEADLINE_S,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def configure(config: pytest.Config, root: Path) -> None:
    """Register what the environment asks for; sessions inside of tests see nothing."""
    failures = os.environ.pop(FAILURES, "")
    second_try = os.environ.pop(SECOND_TRY, "")
    if hasattr(config, "workerinput"):  # of xdist: the session that started it reports
        return
    if failures:
        config.pluginmanager.register(Failures(Path(failures)))
    if second_try:
        listing = root / "build" / "flaky.txt"
        config.pluginmanager.register(SecondTry(Path(second_try), listing))


if __name__ == "__main__":
    sys.exit(not explained(Path(sys.argv[1])))
