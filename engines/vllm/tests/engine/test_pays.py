"""The first token with a slow store: never much later than by computing or loading."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import vllm_models
from vllm_lives import Lives

pytestmark = pytest.mark.slow

SPEEDS = (8 << 20, 64 << 20, 4 << 30)
"""Bytes per second: one that does not pay, one that may, one that does."""
REQUESTS = 8
FIRST = 3
"""Requests of each speed that only learn it."""


def test_a_slow_store_costs_no_more_than_computing(tmp_path: Path) -> None:
    lives = Lives(models=tmp_path / "models", folder=tmp_path)
    vllm_models.FAMILIES["middling"] = vllm_models.MIDDLING
    store = {
        "plugin": "file",
        "root": str(tmp_path / "pages"),
        "free_space": "0",
        "host_memory": "256 MiB",
        "core": {"pays": {"mode": "on"}, "deadlines": {"get": "60 s"}},
        "wrap": [{"name": "faults", "kinds": []}],
    }
    (tmp_path / "pages").mkdir(mode=0o700)
    phase = lives.phase(
        "middling",
        "pays",
        store,
        scene="pay",
        tokens=1000,
        speeds=SPEEDS,
        requests=REQUESTS,
        first=FIRST,
    )
    found = lives.run("pays", [phase], environ={"KVDOCK_CORE__PAYS__MODE": "on"})
    said_all: list[str] = []
    for speed, rows in found["pays"]["seconds"].items():
        compute, load = (statistics.median(rows[one]) for one in ("compute", "load"))
        mine = statistics.median(rows["kvdock"][FIRST:])
        said = f"{int(speed) >> 20} MiB/s: {compute=:.3f} {load=:.3f} {mine=:.3f}"
        said_all.append(said)
        assert mine <= 1.1 * min(compute, load), said_all
