"""Describe the machine that figures were taken on, and keep it busy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

SGLANG_PYTHON = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"


def sglang_python() -> str:
    """Return an interpreter that has SGLang, or "" where there is none."""
    python = os.environ.get("TESTS_OF_KVDOCK_SGLANG_PYTHON", str(SGLANG_PYTHON))
    return python if Path(python).exists() else ""


@contextmanager
def beside(busy: int) -> Iterator[None]:
    """Run processes that never wait beside what is measured."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(busy)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def describe(folder: Path | None = None) -> dict[str, str | float]:
    """Return processor, memory, kernel, Python and file system."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(pages / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(folder or Path.cwd()),
        # What else was running: figures of a busy machine are poor ones.
        "load_average": round(os.getloadavg()[0], 1),
    }


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    best, kind = "", "unknown"
    here = str(folder.resolve()) + "/"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        if here.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, name
    return kind
