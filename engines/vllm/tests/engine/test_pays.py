"""The first token with a slow store: never much later than by computing or loading.

With TESTS_OF_KVDOCK_FIRST_TOKENS=20 in the environment each median is one of 20.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import numpy as np
import pytest
import vllm_models
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm_lives import Lives
from vllm_rigs import open_rig, storage

from kvdock.pays import LoadLimit

SPEEDS = (8 << 20, 64 << 20, 4 << 30)
"""Bytes per second: one that does not pay, one that may, one that does."""
REQUESTS = int(os.environ.get("TESTS_OF_KVDOCK_FIRST_TOKENS", "8"))
FIRST = 3
"""Requests of each speed that only learn it."""


def test_what_was_cut_for_one_request_is_there_for_others(tmp_path: Path) -> None:
    throttle = {
        "name": "faults",
        "kinds": ["throttle"],
        "operations": ["get"],
        "delay": "0.5 s",
    }
    rig = open_rig({**storage(tmp_path / "store"), "wrap": [throttle]})
    keys = rig.keys()
    assert rig.store(keys, [0, 1, 2, 3]).success
    assert rig.lookup(keys) == ["HIT"] * 4
    other = ReqContext(req_id="other")
    assert rig.tier.lookup(keys[0], other) is LookupResult.HIT
    # Computing takes 0.1 s, loading 0.5 s.
    rig.tier.limit("r", LoadLimit(np.linspace(0.1, 0.0, 5)))
    assert not rig.load(keys, [4, 5, 6, 7]).success
    assert rig.lookup(keys) == ["MISS"] * 4
    assert rig.tier.lookup(keys[0], other) is LookupResult.HIT
    rig.finish_request()
    assert rig.lookup(keys) == ["HIT"] * 4
    rig.tier.shutdown()


@pytest.mark.slow
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
    took: list[tuple[float, float, float]] = []
    for speed, rows in found["pays"]["seconds"].items():
        row = (rows["compute"], rows["always"], rows["on"][FIRST:])
        compute, always, on = (statistics.median(one) for one in row)
        took.append((compute, always, on))
        line = (
            f"vLLM, {int(speed) >> 20} MiB/s, medians of {REQUESTS}: "
            f"compute {compute * 1e3:.0f} ms, always {always * 1e3:.0f} ms, "
            f"on {on * 1e3:.0f} ms, ratio {on / min(compute, always):.3f}"
        )
        print(line, flush=True)  # noqa: T201 - what `make bench-pays-engines` shows
    assert all(on <= 1.1 * min(others) for *others, on in took), took
    # Otherwise it proves nothing.
    assert any(always > 1.1 * compute for compute, always, _ in took), took
    assert any(compute > 1.1 * always for compute, always, _ in took), took
    # What was learned is in the log, once a minute.
    log = (tmp_path / "pays.log").read_text()
    said = [line for line in log.splitlines() if "load or compute: " in line]
    assert said
    assert len(said) == len(set(said))
