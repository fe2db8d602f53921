"""The model of tiers beside a replay over real stores, on one host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("kvdock_file")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from eviction_loads import GENERATED
from tier_model import TIERS, TierModel, simulate
from tiers import Counts, attached, replay, settings_of

from kvdock.config import read_tiers

REQUESTS = 400
SHARES = (0.1, 0.3, 1.2)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["conversations", "tenants"])
def test_the_model_counts_what_a_replay_on_one_host_counts(
    tmp_path: Path, load: str
) -> None:
    given = GENERATED[load](REQUESTS)
    capacities = {
        name: int(share * given.unique)
        for name, share in zip(TIERS, SHARES, strict=True)
    }
    settings = settings_of({name: tmp_path / name for name in TIERS}, capacities)
    counts = Counts()
    with attached(settings, max(map(len, given.requests)), counts) as cache:
        real = replay(given, cache, load, counts, oracle=False)
    rules = read_tiers([*TIERS])
    model = simulate(given, TierModel(rules, [*capacities.values()], given.unique))
    hits = (model.asked - model.computed) / model.asked
    assert real.loaded / given.blocks == pytest.approx(hits, abs=0.02)
    everything = sum(counts.loaded.values())
    for name, moved in zip(TIERS, model.moved, strict=True):
        off = abs(counts.loaded[name] - moved.loaded)
        assert off <= 0.05 * everything, f"loaded from {name}: {off} blocks apart"
        if name != TIERS[0]:  # which requests write themselves
            assert counts.copied[name] == pytest.approx(moved.written, rel=0.05), name
