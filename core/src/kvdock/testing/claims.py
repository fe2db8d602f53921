"""Compare what a manifest declares with what the tests of a run could try.

A capability that only the manifest speaks of is not proven: a test that is
skipped for the lack of an oracle or of a small store says nothing about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.plugin.manifest import Manifest, Scope
from kvdock.pools.enums import PoolKind, Sharding
from kvdock.testing.samples import possible_shardings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvdock.testing.subprocess import FinishedRun

_GRADES = (
    "zero_copy",
    "gated_get",
    "gated_put",
    "integrity",
    "eviction",
    "touch",
    "removed",
    "capacity",
    "retention",
    "fork_safe",
    "direct_transfer",
)
_SCOPES = ("durability", "sharing", "clear_reach")
_GRADES_BY_KIND = ("split_heads", "draft", "multi_buffer")


@attrs.frozen
class Claim:
    """A capability that a manifest declares and that the core relies on.

    Limits are not among them: they promise nothing. Neither are
    `memory_registration` and `host_allocator`, which ask something of the core.

    Args:
        capability: The field of the manifest.
        declared: The grade or the scope.
        kind: The kind of pool that it is about; None for all of them.
    """

    capability: str
    declared: str
    kind: PoolKind | None = None

    def __str__(self) -> str:
        """Spell the claim in words."""
        return (
            f"{self.capability} of {self.kind} pools" if self.kind else self.capability
        )

    def tried_by(self, test: FinishedRun) -> bool:
        """Return whether a test of this capability is about this claim."""
        return self.kind is None or test.case.startswith(f"{self.kind}-")


@attrs.frozen
class Unproven:
    """A claim that no test could try.

    Args:
        claim: The claim.
        reasons: Why its tests were skipped, each reason once.
    """

    claim: Claim
    reasons: tuple[str, ...]


def claims_of(manifest: Manifest) -> tuple[Claim, ...]:
    """Return every claim of a manifest, in the order of its fields."""
    found = [
        Claim(field, str(grade))
        for field in _GRADES
        if (grade := getattr(manifest, field))
    ]
    found += [
        Claim(field, str(scope))
        for field in _SCOPES
        if (scope := getattr(manifest, field)) is not Scope.NONE
    ]
    found += [
        Claim(field, str(grade), kind)
        for field in _GRADES_BY_KIND
        for kind, support in manifest.kinds.items()
        if kind is not PoolKind.LOGICAL and (grade := getattr(support, field))
        # No other kind has heads that could be split.
        if field != "split_heads" or Sharding.HEADS in possible_shardings(kind)
    ]
    return tuple(found)


def unproven(
    claims: Iterable[Claim], proofs: Mapping[str, str], ended: Iterable[FinishedRun]
) -> tuple[Unproven, ...]:
    """Return the claims that no test could try.

    Args:
        claims: What is declared.
        proofs: Test name to the capability that the test tries.
        ended: How the tests of a run ended. A failed one did try.
    """
    tests = list(ended)
    found = []
    for claim in claims:
        mine = [
            test
            for test in tests
            if proofs.get(test.name) == claim.capability and claim.tried_by(test)
        ]
        if all(test.how == "skipped" for test in mine):
            reasons = dict.fromkeys(test.why for test in mine)
            found.append(Unproven(claim, tuple(reasons) or ("no test tries it",)))
    return tuple(found)
