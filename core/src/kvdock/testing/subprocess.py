"""Run tests of the kit in a process of their own and read the record.

A process of its own, because a backend that is not right may end it, and
because a plugin's client library cannot be unloaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OPTION = "--kvdock-record"
"""Tells the recorder where to write."""

TEST_LIMIT_S = 300.0
"""How long one test may take before it counts as one that never ends."""

_LOOK_EVERY_S = 0.2


@attrs.frozen
class FinishedRun:
    """How one test ended."""

    suite: str
    name: str
    case: str
    how: str
    why: str
    raised: str
    seconds: float
    where: str = ""
    """The line of the plugin that a failure leads to, or ""."""


@attrs.frozen
class Progress:
    """How far a run of tests has come.

    Args:
        planned: How many tests there are, or 0 if that is not known yet.
        current: The test that runs, or "".
    """

    planned: int = 0
    ended: int = 0
    failed: int = 0
    current: str = ""


@attrs.frozen
class Record:
    """What a run of tests left behind.

    Args:
        ended: Every test that ended, in order; a test whose teardown failed
            is there twice.
        planned: How many tests were collected.
        unfinished: The test that took the process with it, or "".
        status: pytest's exit status; negative for a signal.
        broken: Why tests could not be collected.
        said: The end of what pytest printed, for when nothing else is known.
    """

    ended: tuple[FinishedRun, ...]
    planned: int
    unfinished: str
    status: int
    broken: str
    said: str

    @property
    def left(self) -> int:
        """Return how many tests were to be run and did not end."""
        ended = {(one.suite, one.name, one.case) for one in self.ended}
        return self.planned - len(ended)


def run_tests(
    targets: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 1800.0,
    test_limit_s: float = TEST_LIMIT_S,
    watch: Callable[[Progress], None] | None = None,
) -> Record:
    """Run tests by pytest in a child process.

    Args:
        targets: What to run, in pytest's spelling.
        environ: Variables to add.
        timeout_s: When to give up on the child.
        test_limit_s: When to give up on it because one test does not end:
            a library that holds the interpreter's lock stops every thread.
        watch: Called now and then with how far the run has come.
    """
    with tempfile.TemporaryDirectory(prefix="kvdock-kit-") as folder:
        record = Path(folder) / "record.jsonl"
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--tb=no"),
            *("-p", "kvdock.testing.recorder", "-p", "no:cacheprovider"),
            # What lies around an editable installation is none of its business.
            "--noconftest",
            *("-c", f"{folder}/pytest.ini", "--rootdir", folder),
            *("--basetemp", str(Path(folder) / "stores"), OPTION, str(record)),
            *("-W", "ignore::pytest.PytestReturnNotNoneWarning"),
            *targets,
        ]
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path} | dict(environ or {})
        guard = _Guard(record, timeout_s, test_limit_s, watch or (lambda _: None))
        status, said = _run(command, environment, folder, guard)
        guard.look()
    return _read(guard.lines, status, said)


@attrs.define
class _Guard:
    """Reads a record while it is written, and says when it is enough."""

    record: Path
    timeout_s: float
    test_limit_s: float
    watch: Callable[[Progress], None]
    lines: list[Mapping[str, Any]] = attrs.field(factory=list)
    offset: int = 0
    began: float = attrs.field(factory=time.monotonic)
    test_began: float = attrs.field(factory=time.monotonic)

    def look(self) -> str:
        """Read what is new; return why the run is to be given up, or ""."""
        now = time.monotonic()
        new = self._new_lines()
        if any(line["event"] == "began" for line in new):
            self.test_began = now
        self.lines += new
        found = _read(self.lines, 0, "")
        failed = sum(one.how == "failed" for one in found.ended)
        current = found.unfinished
        self.watch(Progress(found.planned, len(found.ended), failed, current))
        if now > self.began + self.timeout_s:
            return f"the run did not end within {self.timeout_s:.0f} s"
        if current and now > self.test_began + self.test_limit_s:
            name = current.rpartition("::")[2]
            return (
                f"{name} did not end within {self.test_limit_s:.0f} s: a call hangs, "
                "or the store is slow (--scale)"
            )
        return ""

    def _new_lines(self) -> list[Mapping[str, Any]]:
        if not self.record.exists():
            return []
        with self.record.open("rb") as file:
            file.seek(self.offset)
            found = file.read()
        # The last line may be half written.
        whole = found[: found.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _run(
    command: Sequence[str], environ: Mapping[str, str], folder: str, guard: _Guard
) -> tuple[int, str]:
    """Run a command; return its exit status and the end of what it printed.

    Whatever ends the wait also ends the command and all that it has started.
    """
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own words
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    with process:
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=_LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    if enough := guard.look():
                        os.killpg(process.pid, signal.SIGKILL)
                        return -9, enough
                else:
                    return process.returncode, out[-4000:] + err[-4000:]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _read(lines: Sequence[Mapping[str, Any]], status: int, said: str) -> Record:
    ended = []
    open_test = ""
    planned = 0
    broken = ""
    for line in lines:
        match line["event"]:
            case "began":
                open_test = line["test"]
            case "collected":
                planned = line["count"]
            case "broken":
                broken = line["why"]
            case how:
                open_test = ""
                _, _, case = line["test"].partition("[")
                ended.append(
                    FinishedRun(
                        suite=line["suite"],
                        name=line["name"],
                        case=case.removesuffix("]"),
                        how=how,
                        why=line.get("why", ""),
                        raised=line.get("raised", ""),
                        seconds=line["seconds"],
                        where=line.get("where", ""),
                    )
                )
    return Record(tuple(ended), planned, open_test, status, broken, said)
