"""Time `import kvdock` and the commands that are typed most, as whole processes.

Goals: the import and `kvdock --version` take at most 60 ms more than the bare
interpreter, `kvdock --help` at most 60 ms more than `import typer`, and `kvdock list`
at most 1.5 times what loading the same plugins takes in one process, and 250 ms.
Modules are compiled before, as an installation has them. The best of several runs
counts: whatever else the machine does only ever adds. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from machine import describe

RUNS = 15
RESULT = Path(__file__).parent / "results" / "startup.json"
KVDOCK = str(Path(sys.executable).with_name("kvdock"))
COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "import": [sys.executable, "-c", "import kvdock"],
    "typer": [sys.executable, "-c", "import typer"],
    "load": [sys.executable, "-c", "from kvdock import Dock; Dock.load()"],
    "version": [KVDOCK, "--version"],
    "help": [KVDOCK, "--help"],
    "list": [KVDOCK, "list"],
}


def best_ms(environ: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Run every command in turn, several times; its best wall and CPU ms.

    Taking turns lets a busy moment of the machine meet all of them alike. CPU
    time distinguishes a slow program from a busy machine.
    """
    best = dict.fromkeys(COMMANDS, (float("inf"), float("inf")))
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            wall, cpu = run_ms(command, environ)
            best[name] = min(best[name][0], wall), min(best[name][1], cpu)
    return best


def run_ms(command: list[str], environ: Mapping[str, str]) -> tuple[float, float]:
    """Run one command; return its wall and CPU milliseconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with status {process.returncode}")
    return 1000 * wall_s, 1000 * (usage.ru_utime + usage.ru_stime)


def main() -> None:
    """Measure, keep the figures and print them."""
    with tempfile.TemporaryDirectory() as folder:
        # Without it a checkout that writes no bytecode would compile in each run.
        environ = os.environ | {
            "PYTHONPYCACHEPREFIX": folder,
            "PYTHONDONTWRITEBYTECODE": "",
        }
        best = best_ms(environ)
    for name, (wall, cpu) in best.items():
        print(f"{wall:6.1f} ms, {cpu:6.1f} ms of CPU  {name}")
    walls = {name: wall for name, (wall, _) in best.items()}
    figures = {
        "import_over_bare_ms": round(walls["import"] - walls["bare"], 1),
        "version_over_bare_ms": round(walls["version"] - walls["bare"], 1),
        "help_over_typer_ms": round(walls["help"] - walls["typer"], 1),
        "list_ms": round(walls["list"], 1),
        "list_over_load": round(walls["list"] / walls["load"], 2),
    }
    RESULT.parent.mkdir(exist_ok=True)
    record = {"machine": describe(), **figures}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
