"""Metrics of several processes in one exposition, as SGLang serves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITER = """
import sys
from kvdock.batch import Operation, Outcome
from kvdock.events import *
from kvdock.observers.metrics import Metrics

rank = sys.argv[1]
origin = Origin(rank=rank, model="m", namespace="0" * 64)
metrics = Metrics()

def tell(event):
    metrics.kvdock_observe(event, origin)

batch = dict(backend="b", pool="kv", operation=Operation.GET, nbytes=10, seconds=0.1)
tell(BatchEnded(outcomes={Outcome.OK: 5}, **batch))
for backend in ("one", "two") if rank == "tp0" else ("one", ""):
    enabled = bool(backend)
    why = f"to {backend}"
    tell(PoolsDetached())
    tell(PoolRouted(pool="kv", backend=backend, enabled=enabled, reason=why))
tell(CallsBehind(backend="b", calls=3))
tell(BreakerMoved(backend="b", operation=Operation.GET, state="open"))
tell(PagesHeld(pool="kv", pages=8, leased=2))
tell(StoreFilled(backend="b", used_bytes=70, limit_bytes=100, failed_bytes=7))
tell(PagesRestored(pages={"kv": 4}, target=4, draft=2))
tell(PluginLoaded(kind="backend", name="b", distribution="d", version="1", path="p"))
"""
READER = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
import sys

for pid in sys.argv[1:]:
    mark_process_dead(int(pid))
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def start(folder: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a script under multiprocess mode, with warnings as errors."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", source, *arguments],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    with process:
        out, complaints = process.communicate(timeout=60)
    assert (complaints, process.returncode) == ("", 0)
    return out


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What is shown of two ranks, and what once they are known to have ended."""
    folder = tmp_path_factory.mktemp("metrics")
    ranks = [start(folder, WRITER, rank) for rank in ("tp0", "tp1")]
    for rank in ranks:
        output(rank)
    before = output(start(folder, READER))
    return before, output(start(folder, READER, *(str(rank.pid) for rank in ranks)))


def test_ranks_do_not_write_each_others_series(
    exposition: tuple[str, str],
) -> None:
    lines = exposition[0].splitlines()
    assert "pid=" not in "".join(lines)
    for line in (
        'kvdock_pool_enabled{model="m",pool="kv",rank="tp0"} 1.0',
        'kvdock_pool_enabled{model="m",pool="kv",rank="tp1"} 0.0',
        'kvdock_calls_behind{backend="b",model="m",rank="tp1"} 3.0',
        'kvdock_breaker_state{backend="b",model="m",operation="get",rank="tp0"} 2.0',
        'kvdock_store_bytes{backend="b",model="m",rank="tp0",state="used"} 70.0',
        'kvdock_store_bytes{backend="b",model="m",rank="tp0",state="failed"} 7.0',
        'kvdock_draft_restored_ratio{model="m",rank="tp0"} 0.5',
        'kvdock_restored_prefix_pages_total{model="m",rank="tp1"} 4.0',
    ):
        assert line in lines


def test_a_pool_that_is_routed_anew_leaves_one_route_in_force(
    exposition: tuple[str, str],
) -> None:
    lines = exposition[0].splitlines()
    routes = [line for line in lines if line.startswith("kvdock_pool_route_info")]
    now = [line for line in routes if line.endswith(" 1.0")]
    assert len(routes) == 4
    assert {('rank="tp0"' in one, 'reason="to two"' in one) for one in now} == {
        (True, True),
        (False, False),
    }


def test_gauges_end_with_their_process_and_counters_stay(
    exposition: tuple[str, str],
) -> None:
    shown = exposition[1]
    assert "kvdock_pool_enabled{" not in shown
    assert 'kvdock_keys_total{backend="b",model="m"' in shown
