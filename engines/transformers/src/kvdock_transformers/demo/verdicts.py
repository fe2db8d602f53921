"""Holding the runs of a trial against each other."""

from collections.abc import Mapping

import attrs
import numpy as np

from kvdock_transformers.demo.damage import Damage
from kvdock_transformers.demo.records import Phase, PoolRecord, Served
from kvdock_transformers.families import Family

LOGITS_TOLERANCE = 2e-4
"""How far logits may lie from a recomputation in chunks of another size.

Measured: 3e-6 to 3e-5 on the demo's models; chunking alone moves other models
of these families by up to 2e-4.
"""


@attrs.frozen
class Check:
    """One claim about a model's runs, and whether it held."""

    claim: str
    holds: bool
    detail: str = ""


@attrs.frozen(kw_only=True)
class ModelResult:
    """What a trial showed for one model."""

    family: Family
    runs: Mapping[Phase, Served] = attrs.field(repr=False)
    damage: Damage = attrs.field(repr=False)
    checks: tuple[Check, ...]
    diff_warm: float
    diff_recomputed: float
    diff_repaired: float

    @property
    def ok(self) -> bool:
        """Whether every claim held."""
        return all(check.holds for check in self.checks)

    @property
    def tokens_identical(self) -> bool:
        """Whether restored, recomputed and warm run agree on every token."""
        return len({run.token_ids for run in self.runs.values()}) == 1

    @property
    def damage_survived(self) -> bool:
        """Whether all claims about the damaged store held."""
        return all(
            check.holds for check in self.checks if check.claim.startswith("damaged")
        )


def judge(family: Family, runs: Mapping[Phase, Served], damage: Damage) -> ModelResult:
    """Compare the four runs of one model."""
    warm, restored, cold, repaired = (runs[phase] for phase in Phase)
    diffs = [_max_abs_diff(warm, other) for other in (restored, cold, repaired)]
    checks = [
        *_restored_checks(warm, restored, diffs[0]),
        *_recomputed_checks(restored, cold, _max_abs_diff(restored, cold)),
        *_altered_checks(restored),
        *_damage_checks(warm, repaired, damage, diffs[2]),
    ]
    return ModelResult(
        family=family,
        runs=runs,
        damage=damage,
        checks=tuple(checks),
        diff_warm=diffs[0],
        diff_recomputed=_max_abs_diff(restored, cold),
        diff_repaired=diffs[2],
    )


def _max_abs_diff(one: Served, other: Served) -> float:
    first, second = np.load(one.logits_path), np.load(other.logits_path)
    return float(np.abs(first - second).max())


def _restored_checks(warm: Served, restored: Served, diff: float) -> list[Check]:
    pages = (warm.prompt_tokens - 1) // warm.page_tokens
    checks = [
        Check(
            "the store was empty at first",
            warm.found_pages == 0,
            f"{warm.found_pages} pages found",
        ),
        Check(
            "every page of the prefix was restored",
            restored.loaded_pages == pages,
            f"{restored.loaded_pages} of {pages} pages",
        ),
        Check(
            "restored logits are bit-identical to the warm run",
            diff == 0.0,
            f"max abs diff {diff:.3g}",
        ),
        Check(
            "restored tokens are identical to the warm run",
            restored.token_ids == warm.token_ids,
        ),
    ]
    if warm.proposed:
        same = (warm.accepted, warm.proposed) == (restored.accepted, restored.proposed)
        checks.append(
            Check(
                "the draft is accepted as often as before",
                same and restored.draft_loaded_pages == pages,
                f"{warm.accepted}/{warm.proposed} before, "
                f"{restored.accepted}/{restored.proposed} after",
            )
        )
    return checks


def _recomputed_checks(restored: Served, cold: Served, diff: float) -> list[Check]:
    return [
        Check("recomputed tokens are identical", restored.token_ids == cold.token_ids),
        Check(
            f"recomputed logits are within {LOGITS_TOLERANCE:g}",
            diff <= LOGITS_TOLERANCE,
            f"max abs diff {diff:.3g}",
        ),
    ]


def _altered_checks(restored: Served) -> list[Check]:
    checks = []
    for altered in restored.altered:
        if altered.draft:
            checks.append(
                Check(
                    f"altered {altered.pool} pages change the acceptance, and no token",
                    altered.accepted != restored.accepted and altered.tokens_identical,
                    f"{altered.accepted}/{altered.proposed} accepted "
                    f"instead of {restored.accepted}/{restored.proposed}",
                )
            )
        else:
            checks.append(
                Check(
                    f"altered {altered.pool} pages change the logits",
                    altered.max_abs_diff > LOGITS_TOLERANCE,
                    f"max abs diff {altered.max_abs_diff:.3g}",
                )
            )
    tried = {altered.pool for altered in restored.altered}
    missing = sorted(set(restored.pools) - tried)
    checks.append(Check("every pool was altered once", not missing, ", ".join(missing)))
    return checks


def _damage_checks(
    warm: Served, repaired: Served, damage: Damage, diff: float
) -> list[Check]:
    all_pages = (warm.prompt_tokens - 1) // warm.page_tokens
    most = surviving_prefix(warm.pools, damage.lost, all_pages)
    least = surviving_prefix(warm.pools, damage.lost | damage.doubtful, all_pages)
    kept = (
        f"{repaired.loaded_pages} of {all_pages} pages restored, "
        f"{least} to {most} were whole"
    )
    checks = [
        Check("damaged: pages were found in the store and harmed", bool(damage.done)),
        Check(
            "damaged: exactly what is missing was recomputed",
            least <= repaired.loaded_pages <= most < all_pages
            and repaired.computed_tokens
            == warm.prompt_tokens - repaired.loaded_pages * warm.page_tokens,
            kept,
        ),
        Check("damaged: tokens are identical", repaired.token_ids == warm.token_ids),
        Check(
            f"damaged: logits are within {LOGITS_TOLERANCE:g}",
            diff <= LOGITS_TOLERANCE,
            f"max abs diff {diff:.3g}",
        ),
        Check(
            "damaged: the store is whole again",
            repaired.found_after == all_pages,
            f"{repaired.found_after} of {all_pages} pages",
        ),
    ]
    if warm.proposed:
        draft = {name: record for name, record in warm.pools.items() if record.draft}
        limit = repaired.loaded_pages
        least = surviving_prefix(
            draft, damage.lost | damage.doubtful, limit, draft=True
        )
        most = surviving_prefix(draft, damage.lost, limit, draft=True)
        checks.append(
            Check(
                "damaged: the draft is accepted as often as before",
                (repaired.accepted, repaired.proposed) == (warm.accepted, warm.proposed)
                and least <= repaired.draft_loaded_pages <= most,
                f"{repaired.draft_loaded_pages} draft pages restored",
            )
        )
    return checks


def surviving_prefix(
    pools: Mapping[str, PoolRecord],
    lost: frozenset[tuple[str, int]],
    limit: int,
    *,
    draft: bool = False,
) -> int:
    """Work out the longest prefix that can still be restored.

    This is the definition written down once more, on purpose apart from the
    core's evaluation, which it is used to check.

    Args:
        pools: All pools.
        lost: (pool, page) of pages that are gone.
        limit: Pages to consider.
        draft: Whether to look at draft pools instead of the target's.
    """
    whole = {
        name: set(record.stored) - {page for pool, page in lost if pool == name}
        for name, record in pools.items()
        if record.draft == draft
    }
    for prefix in range(limit, 0, -1):
        needed = {
            name: range(
                max(0, prefix - pools[name].window_pages)
                if pools[name].window_pages
                else 0,
                prefix,
            )
            for name in whole
        }
        if all(whole[name].issuperset(needed[name]) for name in whole):
            return prefix
    return 0
