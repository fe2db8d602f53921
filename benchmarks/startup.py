"""Time `import kvdock` and `kvdock list` as whole processes.

The budgets are 60 ms for the import over the bare interpreter, and 250 ms for
the listing. The best of several runs counts: whatever else the machine does
only ever adds. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15
RESULT = Path(__file__).parent / "results" / "startup.json"
KVDOCK = str(Path(sys.executable).with_name("kvdock"))
COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "import": [sys.executable, "-c", "import kvdock"],
    "load": [sys.executable, "-c", "from kvdock import Dock; Dock.load()"],
    "version": [KVDOCK, "--version"],
    "list": [KVDOCK, "list"],
}


def best_ms() -> dict[str, tuple[float, float]]:
    """Run every command in turn, several times; its best wall and CPU ms.

    Taking turns lets a busy moment of the machine meet all of them alike. CPU
    time distinguishes a slow program from a busy machine.
    """
    best = dict.fromkeys(COMMANDS, (float("inf"), float("inf")))
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            wall, cpu = run_ms(command)
            best[name] = min(best[name][0], wall), min(best[name][1], cpu)
    return best


def run_ms(command: list[str]) -> tuple[float, float]:
    """Run one command; return its wall and CPU milliseconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with status {process.returncode}")
    return 1000 * wall_s, 1000 * (usage.ru_utime + usage.ru_stime)


def machine() -> str:
    """Describe the machine in words."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{os.cpu_count()} cores of {platform.machine()}, "
        f"{memory_bytes >> 30} GiB of memory, {platform.system()}, "
        f"Python {platform.python_version()}"
    )


def main() -> None:
    """Measure, keep the figures and print them."""
    best = best_ms()
    for name, (wall, cpu) in best.items():
        print(f"{wall:6.1f} ms, {cpu:6.1f} ms of CPU  {name}")
    figures = {
        "import_over_bare_ms": round(best["import"][0] - best["bare"][0], 1),
        "list_ms": round(best["list"][0], 1),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
