"""The simulation of tiers beside a replay over real stores, on one host."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kvdock import Attachment, Hits
from kvdock.config import read_tiers
from kvdock_cli.simulation.hosts import BLOCK_NS, Hosts, serve
from kvdock_segments.index import UseClock

pytest.importorskip("kvdock_file")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
REQUESTS = 400
SHARES = (0.1, 0.3, 1.2)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = BENCHMARKS / "tier_replay.py"
    spec = importlib.util.spec_from_file_location("tier_replay", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stores' time pass as it does in the simulation.

    What is evicted depends on how long ago pages were used: on a busy machine that is
    something else in every run.
    """
    now_ns = time.time_ns() - 3600 * 10**9
    ask = Attachment.exists

    def exists(self: Attachment, hashes: Sequence[str]) -> Hits:
        nonlocal now_ns
        now_ns += BLOCK_NS * (len(hashes) + 1)
        return ask(self, hashes)

    def read(self: UseClock) -> int:
        self.newest_ns = max(now_ns, self.newest_ns + 1)
        return self.newest_ns

    monkeypatch.setattr(Attachment, "exists", exists)
    monkeypatch.setattr(UseClock, "now_ns", read)


@pytest.mark.slow
@pytest.mark.usefixtures("same_clock")
@pytest.mark.parametrize("load", ["conversations", "tenants"])
def test_the_simulation_counts_what_a_replay_on_one_host_counts(
    tmp_path: Path, bench: ModuleType, load: str
) -> None:
    given = bench.GENERATED[load](REQUESTS)
    names = bench.TIERS
    capacities = {
        name: int(share * given.unique)
        for name, share in zip(names, SHARES, strict=True)
    }
    settings = bench.settings_of({name: tmp_path / name for name in names}, capacities)
    counts = bench.Counts()
    longest = max(map(len, given.requests))
    with bench.attached(settings, longest, counts) as cache:
        real = bench.replay(given, cache, load, counts, oracle=False)
    rooms = [*capacities.values()]
    model = serve(given, Hosts(read_tiers([*names]), rooms, given.unique))
    hits = (model.asked - model.computed) / model.asked
    assert real.loaded / given.blocks == pytest.approx(hits, abs=0.02)
    everything = sum(counts.loaded.values())
    for name, moved in zip(names, model.moved, strict=True):
        off = abs(counts.loaded[name] - moved.loaded)
        assert off <= 0.05 * everything, f"loaded from {name}: {off} blocks apart"
        if name != names[0]:  # which requests write themselves
            assert counts.copied[name] == pytest.approx(moved.written, rel=0.05), name
