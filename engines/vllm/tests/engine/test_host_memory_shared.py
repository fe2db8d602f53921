"""Prompts that do not fit host memory, alone or beside each other, in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from scenes import unlike_others
from test_families import on_files
from vllm_lives import Lives, tokens

BLOCK = 32
ROWS = 64
LIMIT_S = 90.0
"""Until when all must have been answered, on a machine that others use."""

SHARED = Path("/dev/shm")  # noqa: S108 - where vLLM's ranks on a CPU share memory
ENGINE: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 16}


@attrs.frozen
class Row:
    """Stored prompts that come back together.

    Args:
        pages: Whole pages of each.
        requests: How many there are at once.
        restored: Share of their pages that must come from storage at least.
        rounds: How often.
    """

    pages: int
    requests: int
    restored: float
    rounds: int = 2

    def prompts(self, first: int, block: int) -> list[list[int]]:
        """Return prompts that share nothing with those of other rows."""
        count = self.pages * block + 8
        return [unlike_others(first + n, count) for n in range(self.requests)]


@attrs.frozen
class Back:
    """What became of one round."""

    prompts: list[list[int]]
    right: list[list[int]]
    found: dict[str, Any]

    def check(self, restored: float, block: int = BLOCK) -> None:
        """Assert right answers to all, and that each page was loaded once."""
        assert self.found["tokens"] == self.right, self.found
        assert self.found["loads"] <= 1.05 * self.found["different"], self.found
        whole = sum(len(one) // block * block for one in self.prompts)
        assert sum(self.found["cached"]) >= restored * whole, self.found


def come_back(
    lives: Lives,
    folder: Path,
    asked: list[dict[str, Any]],
    *,
    family: str = "llama",
    engine: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> list[Back]:
    """Store prompts with one engine; ask another one that has few rows for them."""
    name = folder.name
    (folder / "store").mkdir()
    storage = on_files(folder / "store")
    prompts = [*{tuple(one): one for each in asked for one in each["prompts"]}.values()]
    given: dict[str, Any] = {"new_tokens": 8}
    plain = lives.phase(family, "store", storage)
    plain["engine"] = {**ENGINE, **plain["engine"], **engine}
    if family in ALONE:
        plain["engine"]["max_num_seqs"] = 1
    plain.update(given, prompts=prompts)
    before = set(SHARED.glob("vllm_dist_*"))
    stored = lives.run(f"{name}-store", [plain])["store"]
    few = {**storage, "host_memory": ROWS * stored["row_bytes"], **more}
    back = {**plain, "name": "back", "storage": few, "prompts": [], "scene": "back"}
    back.update(returns=asked, limit_s=LIMIT_S, beside=family not in ALONE)
    found = lives.run(f"{name}-back", [back])["back"]
    for path in set(SHARED.glob("vllm_dist_*")) - before:
        path.unlink()  # vLLM leaves it behind, see test_pressure
    right = dict(zip(map(tuple, prompts), tokens(stored["rounds"][0]), strict=True))
    return [
        Back(each["prompts"], [right[tuple(one)] for one in each["prompts"]], did)
        for each, did in zip(asked, found["returns"], strict=True)
    ]


ALONE = ("mla", "gdn")
"""Families whose numbers depend on what else is in their batch."""

TABLE = {
    "one page more than rows": Row(65, 1, 0.98, rounds=3),
    "a few more": Row(72, 1, 0.88),
    "two times the rows": Row(120, 1, 0.53),
    "four users": Row(40, 4, 1.0),
    "eight users": Row(16, 8, 1.0),
}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="lru"),
        pytest.param({"eviction_policy": "arc"}, id="arc", marks=pytest.mark.slow),
        pytest.param(
            {"backpressure": {"high_water_s": 0.02, "low_water_s": 0.01}},
            id="backpressure",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stored_prompts_that_do_not_fit_host_memory_are_loaded_once(
    lives: Lives, tmp_path: Path, more: dict[str, Any]
) -> None:
    asked, least = [], []
    for number, row in enumerate(TABLE.values()):
        prompts = row.prompts(1 + 20 * number, BLOCK)
        asked += [{"prompts": prompts}] * row.rounds
        least += [row.restored] * row.rounds
    for back, restored in zip(
        come_back(lives, tmp_path, asked, **more), least, strict=True
    ):
        back.check(restored)


FAMILIES = {
    "swa": (Row(72, 1, 0.9), Row(16, 8, 0.9)),
    # Its windows are stored where prompts end, so a beginning of one is not restored.
    "swa_full": (Row(72, 1, 0), Row(30, 4, 0.9)),
    "chunked": (Row(72, 1, 0), Row(30, 4, 0.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_of_groups_are_counted_as_vllm_loads_them(
    lives: Lives, tmp_path: Path, family: str
) -> None:
    rows = FAMILIES[family]
    asked = [
        {"prompts": row.prompts(1 + 20 * number, BLOCK)}
        for number, row in enumerate(rows)
    ]
    backs = come_back(lives, tmp_path, asked, family=family)
    for back, row in zip(backs, rows, strict=True):
        back.check(row.restored)


TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.slow
def test_two_ranks_share_rows_that_do_not_fit_their_prompts(
    lives: Lives, tmp_path: Path
) -> None:
    rows = Row(72, 1, 0.88), Row(40, 4, 1.0)
    asked = [{"prompts": row.prompts(1 + 20 * n, BLOCK)} for n, row in enumerate(rows)]
    found = come_back(lives, tmp_path, asked, family="llama_2", engine=TWO_RANKS)
    for back, row in zip(found, rows, strict=True):
        back.check(row.restored)


def test_rows_are_given_back_by_requests_that_end_and_caches_that_are_emptied(
    lives: Lives, tmp_path: Path
) -> None:
    four = Row(40, 4, 1.0).prompts(1, BLOCK)
    shared = [four[0] + unlike_others(60 + n, 40) for n in range(6)]
    asked: list[dict[str, Any]] = [
        {"prompts": four, "disturb": "abort"},
        {"prompts": four, "disturb": "reset"},
        {"prompts": shared},
    ]
    waits: dict[str, Any] = {"wait_for_host_memory": "60 s"}
    aborted, emptied, together = come_back(lives, tmp_path, asked, **waits)
    assert aborted.found["tokens"] == aborted.right[1:]
    assert all(one >= 40 * BLOCK for one in aborted.found["cached"])
    assert emptied.found["tokens"] == emptied.right
    # One load serves all who share a prefix.
    together.check(0.97)
    assert together.found["different"] <= 41 + 5
