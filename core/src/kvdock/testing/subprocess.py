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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTION = "--kvdock-record"
"""Tells the recorder where to write."""


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
        """How many tests were to be run and did not end."""
        ended = {(one.suite, one.name, one.case) for one in self.ended}
        return self.planned - len(ended)


def run_tests(
    targets: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 1800.0,
) -> Record:
    """Run tests by pytest in a child process.

    Args:
        targets: What to run, in pytest's spelling.
        environ: Variables to add.
        timeout_s: When to give up on the child.
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
        status, said = _run(command, environment, folder, timeout_s)
        lines = record.read_text().splitlines() if record.exists() else []
    return _read([json.loads(line) for line in lines], status, said)


def _run(
    command: Sequence[str], environ: Mapping[str, str], folder: str, timeout_s: float
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
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -9, f"the run did not end within {timeout_s:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out[-4000:] + err[-4000:]


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
                    )
                )
    return Record(tuple(ended), planned, open_test, status, broken, said)
