"""Vary what a CPU can vary of SGLang, one real engine for each difference.

    python engines/sglang/tests/identity.py                 every case, and the record
    python engines/sglang/tests/identity.py --only YaRN     those with a word in them

An engine stores; another one, with one thing changed, asks for the same prompts. The
record in the documentation says what was found, and when; `engine/identity_cases.py`
lists what differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE.parents[2] / "docs" / "reference" / "sglang-identity.json"
sys.path[:0] = [str(HERE), str(HERE / "engine"), str(HERE / "standin")]

import environment  # noqa: E402 - found by the path above


def run(only: str, limit_s: float, *, missing: bool) -> dict[str, Any]:
    """Run the cases until there is no time left; return what was found of each."""
    import identity_cases as cases
    import sgl_kernel  # noqa: F401 - the stand-in comes before SGLang

    ends = time.monotonic() + limit_s
    recorded = recorded_cases()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world = cases.world_with(folder)
        for number, case in enumerate(cases.EVERY):
            if only not in case.name or time.monotonic() > ends:
                continue
            if missing and case.name in recorded:
                continue
            place = folder / str(number)
            place.mkdir()
            told = cases.ask(world.again(place), case)
            today = f"{datetime.now(UTC):%Y-%m-%d}"
            found[case.name] = {"right": case.found, "date": today, **told}
            # What came too late is no observation.
            keep({n: one for n, one in found.items() if one["found"] != cases.LATE})
            good = told["found"] == case.found and told["same"]
            sys.stdout.write(f"{'ok  ' if good else 'BAD '} {case.name}: {told}\n")
            sys.stdout.flush()
    return found


def recorded_cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return dict(found.get("cases", {}))


def keep(found: dict[str, Any]) -> None:
    """Write what was found so far into the record."""
    record = {
        "sglang": environment.SGLANG,
        "cases": {**recorded_cases(), **found},
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Run in the engine's own environment; write the record."""
    parser = argparse.ArgumentParser(description="Try SGLang's identity of pages.")
    parser.add_argument("--only", default="", help="a word in the names of cases")
    parser.add_argument(
        "--missing", action="store_true", help="only those that the record lacks"
    )
    parser.add_argument("--limit-s", type=float, default=4 * 3600.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        python = environment.build()
        command = [str(python), __file__, "--inside", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **environment.CPU}).returncode  # noqa: PLW1510 - its own status
    found = run(options.only, options.limit_s, missing=options.missing)
    bad = [
        name
        for name, one in found.items()
        if one["found"] != one["right"] or not one["same"]
    ]
    sys.stdout.write(f"{len(found)} cases, {len(bad)} not as they should be\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
