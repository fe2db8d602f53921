"""Sessions that are promised to stay while they pause, under kills and less room."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("kvdock_file")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    path = BENCHMARKS / "retention.py"
    spec = importlib.util.spec_from_file_location("retention_benchmark", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_accepted_promises_hold_and_others_keep_the_rest_of_the_room(
    tmp_path: Path, bench: ModuleType
) -> None:
    trace = tmp_path / "sessions.jsonl"
    bench.generate(trace, 400)
    found = bench.replay(trace, 0.1, kills=2)
    assert found["due"] > 1000
    assert found["broken"] == 0
    assert found["restored_of_promised"] == 1
    assert found["others"] >= 0.9 * found["others_alone"] > 0


def test_sessions_are_found_in_a_trace_and_so_are_their_pauses(
    tmp_path: Path, bench: ModuleType
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "ranges": [[0, 3], [10, 19]]}\n'
        '{"timestamp": 1000, "ranges": [[0, 3], [40, 49]]}\n'
        '{"timestamp": 9000, "ranges": [[0, 3], [10, 19], [60, 60]]}\n'
    )
    found = bench.read(trace)
    assert [(one.session, one.pause_s) for one in found] == [(0, 9), (1, 0), (0, 0)]
