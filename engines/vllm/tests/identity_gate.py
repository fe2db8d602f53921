"""Hold every variation of an engine against the engine's own cold answer.

    python engines/vllm/tests/vllm_environment.py     prints the Python to use
    PYTHON engines/vllm/tests/identity_gate.py [--missing] [WORD ...]

Without words it takes all of them, half an hour; with --missing those that the record
lacks or has otherwise than they must be. The record that the documentation shows is
written after each batch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "engine")]

import vllm_environment  # noqa: E402 - beside this file

os.environ.update(vllm_environment.CPU)

import catalogue  # noqa: E402 - same
from variations import HIT, Seen, Variation, batches, try_all  # noqa: E402 - same
from vllm_lives import Lives  # noqa: E402 - same

MISSING = "--missing"
RECORD = Path(__file__).parents[3] / "docs" / "reference" / "vllm-identity.json"


def main() -> int:
    """Try what was chosen; return 1 if one was not as it must be."""
    words = [word for word in sys.argv[1:] if word != MISSING]
    known = recorded() if MISSING in sys.argv else {}
    chosen = [
        one
        for one in catalogue.ALL
        if known.get(one.name, {}).get("found") != one.expect
        and (not words or any(word in one.name for word in words))
    ]
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = folder / "models"
        models.mkdir()
        for number, batch in enumerate(batches(chosen)):
            own = folder / f"batch-{number}"
            own.mkdir()
            lives = Lives(models=models, folder=own)
            failed += report(batch, try_all(lives, own, batch))
    hits = sum(one.expect == HIT for one in chosen)
    sys.stdout.write(f"{len(chosen)} variations, {hits} hits; {failed} failed\n")
    return 1 if failed else 0


def recorded() -> dict[str, dict[str, str]]:
    """Return the rows of the record, by what differs; of this catalogue alone."""
    known = json.loads(RECORD.read_text())["variations"] if RECORD.exists() else []
    names = {one.name for one in catalogue.ALL}
    return {row["what"]: row for row in known if row["what"] in names}


def report(tried: Sequence[Variation], seen: Mapping[str, Seen]) -> int:
    """Print and record what was found; return how many were not as they must be."""
    rows, failed = recorded(), 0
    today = datetime.now(UTC).date().isoformat()
    for one in tried:
        found = seen[one.name].verdict()
        about = {"what": one.name, "model": one.family, "found": found}
        rows[one.name] = {**about, "date": today}
        wrong = "" if found == one.expect else f"  must be a {one.expect}"
        failed += bool(wrong)
        sys.stdout.write(f"{found:6}{one.family:12}{one.name}{wrong}\n")
        sys.stdout.write(f"      {seen[one.name].error}\n" if wrong else "")
    sys.stdout.flush()
    record = {
        "vllm": vllm_environment.VLLM,
        "variations": [rows[one.name] for one in catalogue.ALL if one.name in rows],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
