"""Compare what a manifest declares with what the tests of a run could try.

A capability that only the manifest speaks of is not proven: a test that is
skipped for the lack of an oracle or of a small store says nothing about it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock.plugin.manifest import Manifest, Scope
from kvdock.pools.enums import PoolKind, Sharding
from kvdock.testing.samples import possible_shardings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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
    "tenant_quotas",
    "fork_safe",
    "peers",
)
_SCOPES = ("durability", "sharing", "clear_reach")
_GRADES_BY_KIND = ("split_heads", "draft", "multi_buffer")
_LIMITS = ("max_object_bytes", "max_batch_keys", "max_key_bytes")


FAULTS = ("frozen", "refusing", "stopped", "halved")
"""What can become of a store: calls of an oracle, each of which it may decline."""


@attrs.frozen
class Claim:
    """A capability that a manifest declares and that the core relies on.

    `memory_registration` and `host_allocator` are not among them: they ask something
    of the core.

    Args:
        capability: The field of the manifest.
        declared: The grade, the scope or the limit; "" for a fault, which no manifest
            declares.
        kind: The kind of pool that it is about; None for all of them.
        beyond: It is about more than one process and its store.
    """

    capability: str
    declared: str
    kind: PoolKind | None = None
    beyond: bool = False

    def __str__(self) -> str:
        """Spell the claim in words."""
        return (
            f"{self.capability} of {self.kind} pools" if self.kind else self.capability
        )

    def tried_by(self, test: FinishedRun) -> bool:
        """Return whether a test of this capability is about this claim."""
        return self.kind is None or test.case.startswith(f"{self.kind}-")


class Proof(StrEnum):
    """How a word ends."""

    PROVEN = "proven"
    IN_PART = "proven in part"
    """Some of its tests could not run: its author can bring what is missing."""
    FAILED = "failed"
    NOT_PROVEN = "not proven"
    """No test could try it: its author can bring what is missing."""
    NOT_HERE = "not provable here"
    """It is about more than one process and its store; only an oracle could try it."""


@attrs.frozen
class Word:
    """A claim, or a fault of the store, and what the tests of a run say about it.

    Args:
        reasons: Why its tests were skipped, each reason once.
    """

    claim: Claim
    proof: Proof
    reasons: tuple[str, ...] = ()

    @property
    def lacking(self) -> bool:
        """Return whether something is declared and not proven.

        A limit says how far other words reach; what lies within it was tried for them.
        """
        promised = self.claim.declared and self.claim.capability not in _LIMITS
        return bool(promised) and self.proof is Proof.NOT_PROVEN


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
        Claim(field, str(limit))
        for field in _LIMITS
        if (limit := getattr(manifest, field))
    ]
    found += [
        Claim(f"{field} of hosts", str(scope), beyond=True)
        for field, near in (("durability", Scope.PROCESS), ("sharing", Scope.HOST))
        if (scope := getattr(manifest, field)) > near
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


def judged(
    claims: Iterable[Claim],
    proofs: Mapping[str, str],
    ended: Iterable[FinishedRun],
    declined: Collection[tuple[str, str]] = (),
) -> tuple[Word, ...]:
    """Return what became of each claim.

    A failed test did try. `declined` are the tests, each with its case, that the
    manifest itself leaves out.
    """
    tests = [test for test in ended if test.name in proofs]
    found = []
    for claim in claims:
        mine = [
            test
            for test in tests
            if proofs[test.name] == claim.capability and claim.tried_by(test)
        ]
        skipped = [test for test in mine if test.how == "skipped"]
        lost = [test for test in skipped if (test.name, test.case) not in declined]
        if any(test.how == "failed" for test in mine):
            found.append(Word(claim, Proof.FAILED))
        elif len(skipped) < len(mine):
            reasons = tuple(dict.fromkeys(test.why for test in lost))
            proof = Proof.IN_PART if lost else Proof.PROVEN
            found.append(Word(claim, proof, reasons))
        else:
            reasons = tuple(dict.fromkeys(test.why for test in mine))
            proof = Proof.NOT_HERE if claim.beyond else Proof.NOT_PROVEN
            found.append(Word(claim, proof, reasons or ("no test tries it",)))
    return tuple(found)
