"""The first token with a slow store: never much later than by computing or loading."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import lives
import pytest
import tiny_models

pytestmark = [pytest.mark.slow, pytest.mark.long]

SPEEDS = (8 << 20, 64 << 20, 4 << 30)
"""Bytes per second: one that does not pay, one that may, one that does."""
REQUESTS = 4
FIRST = 3
"""Requests of each engine that only learn."""
TOKENS = 600


def rounds() -> list[dict[str, Any]]:
    """Return prompts to compute first, then the same prompt again and again."""
    shuffled = random.Random(7)  # noqa: S311 - prompts
    cold = [[shuffled.randrange(4, 500) for _ in range(TOKENS)] for _ in range(4)]
    again = {"prompts": [cold[0]], "first": ["nothing"]}
    return [
        *({"prompts": [one], "first": ["nothing"]} for one in cold),
        *([again] * (FIRST + REQUESTS)),
    ]


def test_a_slow_store_costs_no_more_than_computing(tmp_path: Path) -> None:
    tiny = tiny_models.MIDDLING
    tiny_models.write(tiny, tmp_path / "model")
    said: list[str] = []
    slower = False
    for speed in SPEEDS:
        took: dict[str, float] = {}
        for mode in ("always", "on"):
            folder = tmp_path / f"{mode}-{speed}"
            (folder / "pages").mkdir(parents=True, mode=0o700)
            fault = {
                "name": "faults",
                "kinds": ["throttle"],
                "operations": ["get"],
                "bandwidth": speed,
            }
            storage = {
                "plugin": "file",
                "root": str(folder / "pages"),
                "free_space": "0",
                "wrap": [fault],
            }
            world = lives.World(
                tiny=tiny, model=tmp_path / "model", folder=folder, storage=storage
            )
            environ = {"KVDOCK_CORE__PAYS__MODE": mode}
            seconds = [
                one["seconds"]
                for (one,) in world.live(mode, rounds(), environ=environ, new_tokens=1)
            ]
            took.setdefault("compute", statistics.median(seconds[1:4]))
            took[mode] = statistics.median(seconds[4 + FIRST :])
        said.append(f"{speed >> 20} MiB/s: {took}")
        worse = took["on"] > 1.1 * min(took["compute"], took["always"])
        slower |= worse
    assert not slower, said
