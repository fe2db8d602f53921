"""The first token with a slow store: never much later than by computing or loading.

With TESTS_OF_KVDOCK_FIRST_TOKENS=20 in the environment each median is one of 20.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path
from typing import Any

import lives
import pytest
import tiny_models

import kvdock_trace

pytestmark = [pytest.mark.slow, pytest.mark.long]

SPEEDS = (4 << 30, 64 << 20, 8 << 20)
"""Bytes per second: one that does pay, one that may, one that does not."""
REQUESTS = int(os.environ.get("TESTS_OF_KVDOCK_FIRST_TOKENS", "4"))
COLD = -(-REQUESTS // 2)
"""Prompts that each of the two engines computes at each speed."""
FIRST = 3
"""Requests of each engine and speed that only learn."""
TOKENS = 600


def rounds(speed_file: Path) -> list[dict[str, Any]]:
    """Return for each speed prompts to compute, and one prompt again and again."""
    shuffled = random.Random(7)  # noqa: S311 - prompts

    def any_prompt() -> list[int]:
        return [shuffled.randrange(4, 500) for _ in range(TOKENS)]

    def asked(speed: int, prompt: list[int]) -> dict[str, Any]:
        first = ["write", str(speed_file), str(speed)]
        return {"prompts": [prompt], "first": first}

    known = any_prompt()
    return [
        # Stores it, and is the first step, which takes long.
        asked(SPEEDS[0], known),
        *(
            asked(speed, prompt)
            for speed in SPEEDS
            for prompt in [
                *(any_prompt() for _ in range(COLD)),
                *([known] * (FIRST + REQUESTS)),
            ]
        ),
    ]


def test_a_slow_store_costs_no_more_than_computing(tmp_path: Path) -> None:
    tiny = tiny_models.MIDDLING
    tiny_models.write(tiny, tmp_path / "model")
    took: dict[str, list[float]] = {}
    for mode in ("always", "on"):
        folder = tmp_path / mode
        (folder / "pages").mkdir(parents=True, mode=0o700)
        fault = {"name": "faults", "kinds": ["throttle"], "operations": ["get"]}
        storage = {
            "plugin": "file",
            "root": str(folder / "pages"),
            "free_space": "0",
            "wrap": [fault],
        }
        world = lives.World(
            tiny=tiny, model=tmp_path / "model", folder=folder, storage=storage
        )
        environ = {
            "KVDOCK_CORE__PAYS__MODE": mode,
            "TESTS_OF_KVDOCK_SPEED": str(folder / "speed"),
            kvdock_trace.FOLDER: "",  # it would wait after each round
        }
        asked = rounds(folder / "speed")
        answers = world.live(mode, asked, environ=environ, new_tokens=1)
        took[mode] = [one["seconds"] for (one,) in answers[1:]]
    found: list[tuple[float, float, float]] = []
    each = COLD + FIRST + REQUESTS
    for at, speed in enumerate(SPEEDS):
        mine = {mode: took[mode][at * each :][:each] for mode in took}
        compute = statistics.median(one for two in mine.values() for one in two[:COLD])
        always, on = (
            statistics.median(mine[mode][COLD + FIRST :]) for mode in ("always", "on")
        )
        found.append((compute, always, on))
        line = (
            f"SGLang, {speed >> 20} MiB/s, medians of {REQUESTS}: "
            f"compute {compute * 1e3:.0f} ms, always {always * 1e3:.0f} ms, "
            f"on {on * 1e3:.0f} ms, ratio {on / min(compute, always):.3f}"
        )
        print(line, flush=True)  # noqa: T201 - what `make bench-pays-engines` shows
    assert all(on <= 1.1 * min(others) for *others, on in found), found
    # Otherwise it proves nothing.
    assert any(always > 1.1 * compute for compute, always, _ in found), found
    assert any(compute > 1.1 * always for compute, always, _ in found), found
