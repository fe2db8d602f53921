"""What a trial claims, it has checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from model_demo.damage import Harm
from model_demo.families import Family
from model_demo.records import (
    STORING,
    Altered,
    PoolRecord,
    Role,
    Served,
)
from model_demo.verdicts import Result, judge_stored, surviving_prefix

PAGES = 8


def pool(**changes: Any) -> PoolRecord:
    given: dict[str, Any] = {
        "stored": tuple(range(PAGES)),
        "loaded_pages": PAGES,
        "page_bytes": 1,
    }
    return PoolRecord(**given | changes)


def lost(*pages: tuple[str, int]) -> frozenset[tuple[str, int]]:
    return frozenset(pages)


def test_attention_survives_up_to_the_first_lost_page() -> None:
    assert surviving_prefix({"kv": pool()}, lost(("kv", 5), ("kv", 7)), PAGES) == 5


def test_a_window_lets_a_prefix_end_before_its_lost_page_or_well_behind() -> None:
    pools = {"kv": pool(), "swa": pool(window_pages=2)}
    assert surviving_prefix(pools, lost(("swa", 3)), PAGES) == PAGES
    assert surviving_prefix(pools, lost(("swa", 3), ("kv", 5)), PAGES) == 3


def test_a_state_lets_a_prefix_end_only_where_it_was_kept() -> None:
    pools = {"kv": pool(), "mamba": pool(window_pages=1, stored=(1, 3, 5, 7))}
    assert surviving_prefix(pools, lost(("kv", 7)), PAGES) == 6
    assert surviving_prefix(pools, lost(("kv", 7), ("mamba", 5)), PAGES) == 4


def test_a_draft_does_not_shorten_the_targets_prefix() -> None:
    pools = {"kv": pool(), "draft": pool(draft=True)}
    gone = lost(("draft", 2))
    assert surviving_prefix(pools, gone, PAGES) == PAGES
    assert surviving_prefix(pools, gone, PAGES, draft=True) == 2


@pytest.fixture
def runs(tmp_path: Path) -> dict[Role, Served]:
    made = {}
    for role in STORING:
        path = tmp_path / f"{role}.npy"
        np.save(path, np.arange(6, dtype=np.float32).reshape(3, 2))
        loaded = {Role.RESTORE: PAGES, Role.REPAIR: 5}.get(role, 0)
        made[role] = Served(
            family=Family.MHA,
            prompt_tokens=PAGES * 4 + 1,
            page_tokens=4,
            found_pages=loaded,
            loaded_pages=loaded,
            draft_loaded_pages=loaded,
            computed_tokens=PAGES * 4 + 1 - loaded * 4,
            ttft_s=1.0,
            token_ids=(1, 2, 3),
            logits_path=str(path),
            proposed=10,
            accepted=4,
            found_after=PAGES,
            pools={"kv": pool(), "draft": pool(draft=True)},
        )
    altered: dict[str, Any] = {"tokens_identical": True, "proposed": 10}
    made[Role.RESTORE] = attrs.evolve(
        made[Role.RESTORE],
        altered=(
            Altered(pool="kv", draft=False, max_abs_diff=1.0, accepted=4, **altered),
            Altered(pool="draft", draft=True, max_abs_diff=0.0, accepted=1, **altered),
        ),
    )
    return made


DAMAGE = (("kv", 5, Harm.FLIP),)


def judged(runs: dict[Role, Served]) -> Result:
    found = {role: {Family.MHA: one} for role, one in runs.items()}
    return judge_stored(Family.MHA, found, DAMAGE)


def failures(runs: dict[Role, Served]) -> list[str]:
    return [check.claim for check in judged(runs).checks if not check.holds]


def test_runs_that_agree_are_ok(runs: dict[Role, Served]) -> None:
    result = judged(runs)
    assert result.ok
    assert result.damage_survived
    assert result.tokens_identical


@pytest.mark.parametrize(
    ("role", "changes", "claim"),
    [
        (Role.OFFLOAD, {"found_pages": 1}, "the store was empty"),
        (Role.RESTORE, {"loaded_pages": 7}, "every page of the prefix"),
        (Role.RESTORE, {"accepted": 5}, "the draft is accepted"),
        (Role.RESTORE, {"altered": ()}, "every pool was altered"),
        (Role.RECOMPUTE, {"token_ids": (1, 2, 4)}, "recomputed tokens"),
        (Role.REPAIR, {"loaded_pages": 6}, "damaged: exactly what is missing"),
        (Role.REPAIR, {"computed_tokens": 1}, "damaged: exactly what is missing"),
        (Role.REPAIR, {"token_ids": (0, 2, 3)}, "damaged: tokens"),
        (Role.REPAIR, {"found_after": 5}, "damaged: the store is whole"),
    ],
)
def test_every_difference_fails_its_own_claim(
    runs: dict[Role, Served], role: Role, changes: dict[str, Any], claim: str
) -> None:
    runs[role] = attrs.evolve(runs[role], **changes)
    assert any(failed.startswith(claim) for failed in failures(runs))


@pytest.mark.parametrize(
    ("role", "by", "claim"),
    [
        (Role.RESTORE, 1e-7, "logits are bit-identical"),
        (Role.RECOMPUTE, 1e-2, "recomputed logits"),
        (Role.REPAIR, 1e-2, "damaged: logits"),
    ],
)
def test_logits_that_are_off_fail(
    runs: dict[Role, Served], role: Role, by: float, claim: str
) -> None:
    logits = np.load(runs[role].logits_path)
    logits[0, 0] += by
    np.save(runs[role].logits_path, logits)
    assert any(failed.startswith(claim) for failed in failures(runs))


def test_altered_pages_that_change_nothing_fail(runs: dict[Role, Served]) -> None:
    restored = runs[Role.RESTORE]
    unused = tuple(
        attrs.evolve(altered, max_abs_diff=0.0, accepted=4)
        for altered in restored.altered
    )
    runs[Role.RESTORE] = attrs.evolve(restored, altered=unused)
    assert len(failures(runs)) == 2
