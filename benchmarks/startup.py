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


def best_ms() -> dict[str, float]:
    """Run every command in turn, several times; milliseconds of its best run.

    Taking turns lets a busy moment of the machine meet all of them alike.
    """
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


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
    for name, milliseconds in best.items():
        print(f"{milliseconds:6.1f} ms  {name}")
    figures = {
        "import_over_bare_ms": round(best["import"] - best["bare"], 1),
        "list_ms": round(best["list"], 1),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
