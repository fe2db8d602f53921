"""The report of the kit that a plugin's package carries, and whether it is believed.

A manifest says that a backend verifies what it returns; the core leaves its trailers
off only for a proof of that: a report of `kvdock check` that fits the very files that
are installed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from kvdock.plugin.manifest import API_VERSION

REPORT = "kvdock-report.json"
"""The file of a plugin's package that holds its report."""

NO_REPORT = "its package carries no report of the kit"


def why_unproven(value: str) -> str:
    """Return why the integrity that a loaded plugin declares is not proven, or "".

    Args:
        value: What its entry point names.
    """
    folder = package_of(value)
    if folder is None:
        return NO_REPORT
    try:
        report: Any = json.loads((folder / REPORT).read_bytes())
        evidence = report["evidence"]
        proven = [one["word"] for one in report["words"] if one["proof"] == "proven"]
        if evidence["contract"] != API_VERSION:
            return f"its report is of contract {evidence['contract']}"
        if evidence["digest"] != digest_of(folder):
            return "its report is of other files than those installed"
        passed = report["ok"] is True
    except FileNotFoundError:
        return NO_REPORT
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"its report cannot be read ({type(error).__name__}: {error})"
    return "" if passed and "integrity" in proven else "its report does not prove it"


def package_of(value: str) -> Path | None:
    """Return the folder of a loaded plugin's package; None if it has none."""
    package = sys.modules.get(value.partition(":")[0].partition(".")[0])
    folders = list(getattr(package, "__path__", ()))
    return Path(folders[0]) if len(folders) == 1 else None


def digest_of(folder: Path) -> str:
    """Return a digest of names and bytes of a package's files but for the report."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix != ".pyc" and path.name != REPORT and path.is_file():
            data = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            whole.update(f"{len(name)} {name} {len(data)} ".encode() + data)
    return whole.hexdigest()
