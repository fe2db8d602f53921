"""(4) Two ranks over gloo, and the questions for names that need them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import environment
import lives
import pytest
import warm_python

TRIAL = Path(__file__).with_name("rank_trial.py")


@pytest.fixture(scope="module")
def seen(
    backend: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run two ranks side by side through all trials; what each of them saw."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), backend)


def run_ranks(
    folder: Path, backend: dict[str, Any], *trial: str
) -> list[dict[str, Any]]:
    """Run two ranks side by side, through all trials or one that is named."""
    given = ["2", str(folder), json.dumps(backend), *trial]
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    environ = {**os.environ, **environment.CPU}
    # Each with hashes of another seed, as ranks have.
    started = [
        warm_python.warm(lives.IMPORTED, seed=rank + 1)(
            [str(TRIAL), str(rank), *given], environ, log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process, log in zip(started, logs, strict=True):
            assert process.wait(180) == 0, log.read_text()[-3000:]
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [json.loads(log.read_text().strip().splitlines()[-1]) for log in logs]


def test_a_divided_draft_beside_a_replicated_target_is_found_by_both_ranks(
    seen: list[dict[str, Any]],
) -> None:
    assert [one["draft, hooked"] for one in seen] == [{"pages": 5, "equal": True}] * 2


def test_without_the_patch_no_rank_ever_finds_that_prefix(
    seen: list[dict[str, Any]],
) -> None:
    """What the first hook is for; when this fails, SGLang asks no more."""
    assert [one["draft, bare"]["pages"] for one in seen] == [0, 0]


def test_ranks_agree_on_a_prefix_that_both_can_restore(
    seen: list[dict[str, Any]],
) -> None:
    states = [one["states, hooked"] for one in seen]
    assert [one["own"] for one in states] == [[2, 4], [2, 5]]
    assert all(one["pages"] == 2 and one["equal"] for one in states)


def test_pages_divided_by_token_are_stored_with_the_patch_and_rejected_without(
    seen: list[dict[str, Any]],
) -> None:
    assert [one["dcp, hooked"] for one in seen] == [{"pages": 3, "equal": True}] * 2
    assert all(
        "requires file or Mooncake" in one["dcp, bare"]["rejected"] for one in seen
    )
