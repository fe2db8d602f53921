"""Repeat one test beside busy processes, each time in a process of its own.

Usage: python tests/harness/repeat_test.py TIMES TEST [ARGUMENTS OF PYTEST]

Prints the first failure whole, and how many there were; ends with status 1 if any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "import os; os.nice(5)\nwhile True: pass"
DEADLINE_S = 900.0


@contextmanager
def load() -> Iterator[None]:
    """Keep every core busy, at a lower priority than the test."""
    command = [sys.executable, "-c", BUSY]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def failure(test: str, arguments: list[str]) -> str:
    """Run a test; return what pytest printed if it failed, else ""."""
    command = [sys.executable, "-m", "pytest", "-q", test, *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {DEADLINE_S:.0f} s"
    return ran.stdout + ran.stderr if ran.returncode else ""


def main(arguments: list[str]) -> int:
    times, test, *rest = arguments
    failures = 0
    with load():
        for _ in range(int(times)):
            text = failure(test, rest)
            if text and not failures:
                sys.stdout.write(text)
            failures += bool(text)
    sys.stdout.write(f"{failures} of {times} failed: {test}\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
