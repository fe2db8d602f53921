"""Hold every variation of an engine against the engine's own cold answer.

    python engines/vllm/tests/vllm_environment.py     prints the Python to use
    PYTHON engines/vllm/tests/identity_gate.py [WORD ...]

Without words it takes all of them, a quarter of an hour, and writes the record that
the documentation shows, with its date.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "engine")]

import vllm_environment  # noqa: E402 - beside this file

os.environ.update(vllm_environment.CPU)

import catalogue  # noqa: E402 - same
from variations import HIT, try_all  # noqa: E402 - same
from vllm_lives import Lives  # noqa: E402 - same

RECORD = Path(__file__).parents[3] / "docs" / "reference" / "vllm-identity.json"


def main() -> int:
    """Try what was chosen; return 1 if one was not as it must be."""
    words = sys.argv[1:]
    chosen = [
        one
        for one in catalogue.ALL
        if not words or any(word in one.name for word in words)
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = folder / "models"
        models.mkdir()
        seen = try_all(Lives(models=models, folder=folder), folder, chosen)
    rows = []
    for one in chosen:
        verdict = seen[one.name].verdict()
        rows.append({"what": one.name, "model": one.family, "found": verdict})
        wrong = "" if verdict == one.expect else f"  must be a {one.expect}"
        sys.stdout.write(f"{verdict:6}{one.family:12}{one.name}{wrong}\n")
        sys.stdout.write(f"      {seen[one.name].error}\n" if wrong else "")
    failed = [one for one in chosen if seen[one.name].verdict() != one.expect]
    hits = sum(one.expect == HIT for one in chosen)
    sys.stdout.write(
        f"{len(chosen)} variations, {hits} of them hits; {len(failed)} failed\n"
    )
    if not words and not failed:
        record = {
            "vllm": vllm_environment.VLLM,
            "date": datetime.now(UTC).date().isoformat(),
            "variations": rows,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
