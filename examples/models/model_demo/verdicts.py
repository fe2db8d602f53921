"""Compare the runs of a demo: what it claims, it has checked."""

from collections.abc import Mapping

import attrs
import numpy as np

from model_demo.damage import Target
from model_demo.families import Family
from model_demo.records import (
    SENDING,
    STORING,
    PoolRecord,
    Role,
    Runs,
    Served,
)

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
class Result:
    """The verdict of a demo on one model.

    Args:
        family: Which model.
        runs: What each process has made of it.
        checks: Each claim, and whether it held.
        max_abs_diff: Largest difference of logits between the run that computed the
            pages and the one that was given them.
        diff_recomputed: The same between the latter and a recomputation.
        damage: What was done to the store, if anything.
    """

    family: Family
    runs: Mapping[Role, Served] = attrs.field(repr=False)
    checks: tuple[Check, ...]
    max_abs_diff: float
    diff_recomputed: float = 0.0
    damage: tuple[Target, ...] = attrs.field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Return whether every claim held."""
        return all(check.holds for check in self.checks)

    @property
    def tokens_identical(self) -> bool:
        """Return whether all runs agree on every token."""
        return len({run.token_ids for run in self.runs.values()}) == 1

    @property
    def damage_survived(self) -> bool:
        """Return whether all claims about the damaged store held."""
        return all(
            check.holds for check in self.checks if check.claim.startswith("damaged")
        )


def judge_stored(family: Family, runs: Runs, damage: tuple[Target, ...]) -> Result:
    """Compare the four runs of one model of the demo of stored pages."""
    own = {role: runs[role][family] for role in STORING}
    warm, restored, cold, repaired = own.values()
    diff = _max_abs_diff(warm, restored)
    diff_recomputed = _max_abs_diff(restored, cold)
    return Result(
        family=family,
        runs=own,
        checks=(
            *_restored_checks(warm, restored, diff),
            *_recomputed_checks(restored, cold, diff_recomputed),
            *_altered_checks(restored),
            *_damage_checks(warm, repaired, damage),
        ),
        max_abs_diff=diff,
        diff_recomputed=diff_recomputed,
        damage=damage,
    )


def judge_sent(family: Family, runs: Runs) -> Result:
    """Compare what two processes generated with what one of them would have."""
    own = {role: runs[role][family] for role in SENDING}
    prefill, decode = own.values()
    diff = _max_abs_diff(prefill, decode)
    lacking = sorted(set(decode.pools) - set(decode.arrived))
    expected = sum(pool.loaded_bytes for pool in decode.pools.values())
    tail = decode.prompt_tokens - decode.prefix_pages * decode.page_tokens
    checks = [
        Check("every pool arrived whole", not lacking, ", ".join(lacking)),
        Check(
            "as many bytes arrived as the pages have",
            decode.arrived_bytes == expected,
            f"{decode.arrived_bytes} of {expected}",
        ),
        Check(
            "decode computed only what follows the last full page",
            decode.computed_tokens == tail,
            f"{decode.computed_tokens} of {decode.prompt_tokens} tokens",
        ),
        *_identical("those of one process", prefill, decode, diff),
    ]
    if prefill.proposed:
        checks.append(_accepted("as in one process", prefill, decode))
    return Result(family=family, runs=own, checks=tuple(checks), max_abs_diff=diff)


def _identical(what: str, one: Served, other: Served, diff: float) -> list[Check]:
    return [
        Check(f"tokens are identical to {what}", one.token_ids == other.token_ids),
        Check(
            f"logits are bit-identical to {what}",
            diff == 0.0,
            f"max abs diff {diff:.3g}",
        ),
    ]


def _close(claim: str, diff: float) -> Check:
    return Check(
        f"{claim} are within {LOGITS_TOLERANCE:g}",
        diff <= LOGITS_TOLERANCE,
        f"max abs diff {diff:.3g}",
    )


def _accepted(as_when: str, one: Served, other: Served, *, whole: bool = True) -> Check:
    before, after = (one.accepted, one.proposed), (other.accepted, other.proposed)
    return Check(
        f"the draft is accepted as often {as_when}",
        whole and before == after,
        f"{before[0]}/{before[1]} there, {after[0]}/{after[1]} here",
    )


def _max_abs_diff(one: Served, other: Served) -> float:
    first, second = np.load(one.logits_path), np.load(other.logits_path)
    if first.shape != second.shape:
        return float("inf")
    return float(np.abs(first - second).max())


def _restored_checks(warm: Served, restored: Served, diff: float) -> list[Check]:
    pages = warm.prefix_pages
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
        *_identical("the warm run's", warm, restored, diff),
    ]
    if warm.proposed:
        whole = restored.draft_loaded_pages == pages
        checks.append(_accepted("as before", warm, restored, whole=whole))
    return checks


def _recomputed_checks(restored: Served, cold: Served, diff: float) -> list[Check]:
    return [
        Check("recomputed tokens are identical", restored.token_ids == cold.token_ids),
        _close("recomputed logits", diff),
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
    warm: Served, repaired: Served, damage: tuple[Target, ...]
) -> list[Check]:
    pages = warm.prefix_pages
    lost = frozenset((pool, page) for pool, page, _ in damage)
    whole = surviving_prefix(warm.pools, lost, pages)
    loaded = repaired.loaded_pages
    checks = [
        Check("damaged: pages were found in the store and harmed", bool(damage)),
        Check(
            "damaged: exactly what is missing was recomputed",
            loaded == whole < pages
            and repaired.computed_tokens
            == warm.prompt_tokens - loaded * warm.page_tokens,
            f"{loaded} of {pages} pages restored, {whole} were whole",
        ),
        Check("damaged: tokens are identical", repaired.token_ids == warm.token_ids),
        _close("damaged: logits", _max_abs_diff(warm, repaired)),
        Check(
            "damaged: the store is whole again",
            repaired.found_after == pages,
            f"{repaired.found_after} of {pages} pages",
        ),
    ]
    if warm.proposed:
        draft = {name: record for name, record in warm.pools.items() if record.draft}
        whole = surviving_prefix(draft, lost, loaded, draft=True)
        checks.append(
            Check(
                "damaged: the draft is accepted as often as before",
                (repaired.accepted, repaired.proposed) == (warm.accepted, warm.proposed)
                and repaired.draft_loaded_pages == whole,
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
        starts = {name: prefix - (pools[name].window_pages or prefix) for name in whole}
        if all(
            whole[name].issuperset(range(max(0, start), prefix))
            for name, start in starts.items()
        ):
            return prefix
    return 0
