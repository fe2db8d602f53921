"""Run benchmarks one after the other; the last line is all their figures.

Usage: python benchmarks/run.py [--busy N] [NAME ...]

Each NAME is a script beside this one whose last line is a JSON object. With --busy N,
N processes that never wait run beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import beside

HERE = Path(__file__).parent
QUICK = (
    "startup",
    "plan",
    "sessions",
    "attach",
    "page_path",
    "byte_costs",
    "hashes",
)


def figures_of(name: str) -> dict[str, object]:
    """Run one benchmark, pass its output on, and return its last line."""
    print(f"== {name}", flush=True)
    with subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        raise SystemExit(f"benchmark {name} failed with status {process.returncode}")
    found: dict[str, object] = json.loads(last)
    return found


def main(arguments: list[str]) -> None:
    """Run the benchmarks that are named, or the quick ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(arguments)
    names: list[str] = given.names
    every: dict[str, object] = {}
    for name in names:
        if not (HERE / f"{name}.py").exists():
            raise SystemExit(f"unknown benchmark {name!r}; try {', '.join(QUICK)}")
    with beside(given.busy):
        for name in names or QUICK:
            every |= figures_of(name)
    print(json.dumps(every))


if __name__ == "__main__":
    main(sys.argv[1:])
