"""What one backend says to one pool: verdicts, a path, and how it is cut.

Every field of a manifest is held against something that a pool or its
deployment needs. A backend's own judgement, where it has one, comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock.config.convert import to_word
from kvdock.config.core import Integrity, StagingPolicy
from kvdock.plugin.evidence import NO_REPORT
from kvdock.plugin.manifest import (
    Capability,
    KindSupport,
    Manifest,
    Scope,
    Support,
    Verdict,
)
from kvdock.pools.enums import ObjectUnit
from kvdock.pools.layout import count_buffers, stored_objects
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from kvdock.config.tiers import Tier

CapabilityCheck = Callable[[str, Capability, PoolSpec, Shard], Verdict | None]
"""(backend, capability, pool, shard) to its own verdict, or None."""


HASH_CHARS = 64
"""A page hash in hex; 64 more characters are the namespace's digest."""


LIMITS = (Capability.OBJECT_SIZE, Capability.BATCH_SIZE, Capability.KEY_SIZE)
"""What a manifest bounds; asked about once it is known how pages are cut."""


class IntegrityCheck(StrEnum):
    """The proof that a page's bytes are those that were stored."""

    BACKEND = "verified by the backend"
    """Its manifest says that it verifies length and content."""
    TRAILER = "verified by a trailer"
    """The core adds a trailer to each object."""
    SEALED = "sealed"
    """A wrapper encrypts and authenticates each object."""
    NONE = "UNVERIFIED by choice"
    """Not verified, since integrity was switched off."""


class TransferMode(StrEnum):
    """How bytes get from the engine's memory to the backend."""

    ZERO_COPY = "zero copy"
    """The backend reads and writes the engine's memory."""
    GATED = "gated"
    """As zero copy, but only until the call returns, abandoned or not."""
    STAGED = "staged"
    """One copy through a contiguous buffer."""
    NONE = "none"
    """The pool has no bytes, or no route."""


def _scope(value: object) -> Scope:
    return to_word(value, Scope)


def _integrity(value: object) -> Integrity:
    return to_word(value, Integrity)


def _staging_policy(value: object) -> StagingPolicy:
    return to_word(value, StagingPolicy)


@attrs.frozen(kw_only=True)
class RouteRequirements:
    """What a deployment asks of every backend, beyond its pools.

    Args:
        sharing: Who must find what was stored.
        durability: What stored bytes must survive the end of.
        clear_reach: The farthest that a clear may go.
        native_integrity: Whether the backend must verify what it returns itself.
        integrity: Who verifies pages where that is left open.
        eviction: Whether it must make room by itself when it is full.
        fork_safe: Whether handles are used in forked children.
        peers: Whether pages also go straight to a peer's memory.
        registrable: Whether the engine's memory may be made known to a
            library (pinned, exported). Memory that may not is staged.
        allocator: The backend whose allocator the memory came from; "" where
            the engine allocated it, None where it is still to be allocated.
        staging: Which pools are moved through memory of the core, as in the
            core's setting `calls.staging`.
        tenant_quotas: Whether tenants have quotas. A backend that keeps none is
            taken all the same, and says so.
    """

    sharing: Scope = attrs.field(default=Scope.NONE, converter=_scope)
    durability: Scope = attrs.field(default=Scope.NONE, converter=_scope)
    clear_reach: Scope = attrs.field(default=Scope.CLUSTER, converter=_scope)
    native_integrity: bool = False
    integrity: Integrity = attrs.field(default=Integrity.AUTO, converter=_integrity)
    eviction: bool = False
    fork_safe: bool = False
    peers: bool = False
    registrable: bool = True
    allocator: str | None = ""
    staging: StagingPolicy = attrs.field(
        default=StagingPolicy.ROUTED, converter=_staging_policy
    )
    tenant_quotas: bool = False


@attrs.frozen
class RouteOption:
    """What one backend said to one pool.

    Args:
        verdicts: One for each capability that the pool needs, in order.
        mode: How bytes would move.
        unit: How much of a page would go under one key.
        note: Why the path is not a better one, or "".
        allocate: Whether the pool should be allocated by the backend.
        retention: Whether its pages are promised and expire, only expire, or neither.
        check_note: Why the core adds a trailer although the backend declares that it
            verifies pages, or that this is taken on trust, or "".
        ignores_quotas: Whether tenants have quotas that it does not keep.
        wrapped_by: The wrappers around its stores, the innermost first.
        tier: What comes into it when; None where the pool has no tiers.
    """

    backend: str
    verdicts: tuple[tuple[Capability, Verdict], ...]
    mode: TransferMode
    unit: ObjectUnit
    note: str = ""
    allocate: bool = False
    check: IntegrityCheck = IntegrityCheck.BACKEND
    retention: Support = Support.NO
    check_note: str = ""
    ignores_quotas: bool = False
    wrapped_by: tuple[str, ...] = ()
    tier: Tier | None = None

    @property
    def accepted(self) -> bool:
        """Return whether every capability that the pool needs is there."""
        return all(verdict for _, verdict in self.verdicts)

    @property
    def reason(self) -> str:
        """Return why it was refused, or how it would be done."""
        refusals = [verdict.reason for _, verdict in self.verdicts if not verdict]
        if refusals:
            return "; ".join(refusals)
        path = f"{self.mode} ({self.note})" if self.note else str(self.mode)
        emulated = [
            f"{capability} is emulated"
            for capability, verdict in self.verdicts
            if verdict.support is Support.EMULATED
        ]
        per = "one object a page"
        if self.unit is not ObjectUnit.PAGE:
            per = f"one object a {self.unit}"
        # What is usual is not repeated in every row.
        check = [] if self.check is IntegrityCheck.BACKEND else [str(self.check)]
        if self.check_note:
            check = [f"{self.check}, {self.check_note}"]
        unproven = self.check in (IntegrityCheck.NONE, IntegrityCheck.SEALED)
        if unproven and not self.retention:
            check.append("pages that are to expire are not stored")
        if self.ignores_quotas:
            check.append("keeps no quotas of tenants")
        around = ", ".join(self.wrapped_by)
        wrapped = [f"wrapped by {around}"] if around else []
        return "; ".join([f"{path}, {per}", *emulated, *check, *wrapped])

    @property
    def not_chosen(self) -> str:
        """The same, for a backend that another one was preferred to."""
        works = "works as well: " if self.accepted else ""
        return f"not chosen: {works}{self.reason}"


@attrs.frozen
class _Evaluation:
    """One pool before one backend."""

    pool: PoolSpec
    shard: Shard
    manifest: Manifest
    needs: RouteRequirements
    judge: CapabilityCheck | None
    unproven: str

    @property
    def check(self) -> IntegrityCheck:
        """Return who verifies the pool's pages."""
        checks = self.needs.integrity
        if self.pool.physical and self.manifest.sealed:
            return IntegrityCheck.SEALED
        native = self.manifest.integrity is Support.NATIVE and not self.doubt
        if not self.pool.physical or (native and checks is not Integrity.ALWAYS):
            return IntegrityCheck.BACKEND
        return (
            IntegrityCheck.NONE if checks is Integrity.OFF else IntegrityCheck.TRAILER
        )

    @property
    def doubt(self) -> str:
        """Return why integrity that is declared does not count, or ""."""
        trusts = self.needs.integrity is Integrity.TRUST
        return "" if trusts or not self.manifest.integrity else self.unproven

    def verdict(self, capability: Capability, pool: PoolSpec | None = None) -> Verdict:
        """Ask the backend, and where it has no opinion its manifest.

        A backend may tighten the limits of its manifest and never loosen them:
        the core cuts batches by what the manifest says.
        """
        about = pool or self.pool
        if capability in LIMITS:
            stated = from_manifest(
                capability, about, self.shard, self.manifest, self.needs
            )
            if not stated:
                return stated
        if capability is Capability.INTEGRITY and self.doubt:
            # No verdict of its own can stand in for a proof either.
            why = f"{self.manifest.name} declares integrity, and {self.doubt}"
            return Verdict(Support.NO, why)
        said = (
            self.judge(self.manifest.name, capability, about, self.shard)
            if self.judge
            else None
        )
        # A verdict of NO is false, and still the backend's own word.
        if said is not None:
            return said
        return from_manifest(capability, about, self.shard, self.manifest, self.needs)


def evaluate_backend(
    pool: PoolSpec,
    shard: Shard,
    manifest: Manifest,
    needs: RouteRequirements,
    judge: CapabilityCheck | None = None,
    *,
    unproven: str = NO_REPORT,
) -> RouteOption:
    """Return what a backend says to a pool, with the best way to move it.

    Where integrity is `unproven` for a reason, NATIVE counts as NO, and the core adds
    trailers, unless the deployment trusts what is declared.
    """
    case = _Evaluation(pool, shard, manifest, needs, judge, unproven)
    store = case.verdict(Capability.STORE)
    if not store:
        refused = ((Capability.STORE, store),)
        return RouteOption(manifest.name, refused, TransferMode.NONE, ObjectUnit.PAGE)
    path, unit, note, allocate = _transfer_mode(case)
    sized = attrs.evolve(pool, object_unit=unit)
    verdicts = [(Capability.STORE, store)]
    verdicts += [(need, case.verdict(need)) for need in _needed(pool, shard, needs)]
    verdicts += [(limit, case.verdict(limit, sized)) for limit in LIMITS]
    if case.check is IntegrityCheck.TRAILER:
        verdicts.append((Capability.OBJECT_SIZE, _with_trailer(sized, shard, manifest)))
    retention = Support.NO
    if manifest.retention is Support.NATIVE:
        retention = case.verdict(Capability.RETENTION).support
    elif case.check is IntegrityCheck.TRAILER:
        retention = Support.EMULATED
    check_note = ""
    if manifest.integrity is Support.NATIVE and unproven and pool.physical:
        check_note = {
            IntegrityCheck.TRAILER: f"as it declares integrity, and {unproven}",
            IntegrityCheck.BACKEND: f"on trust: {unproven}",
        }.get(case.check, "")
    return RouteOption(
        manifest.name,
        tuple(verdicts),
        path,
        unit,
        note,
        allocate,
        case.check,
        retention,
        check_note=check_note,
        ignores_quotas=needs.tenant_quotas
        and pool.physical
        and not manifest.tenant_quotas,
    )


def _needed(pool: PoolSpec, shard: Shard, needs: RouteRequirements) -> list[Capability]:
    """List what a pool needs besides being stored within the limits."""
    wanted = {
        Capability.HIT_POLICY: not pool.engine_hits,
        Capability.LAYOUT: pool.physical,
        Capability.SHARDING: True,
        Capability.DRAFT: pool.draft,
        Capability.SPLIT_HEADS: len(pool.head_groups(shard)) > 1,
        Capability.SHARING: needs.sharing is not Scope.NONE,
        Capability.DURABILITY: needs.durability is not Scope.NONE,
        Capability.CLEAR_REACH: needs.clear_reach is not Scope.CLUSTER,
        Capability.INTEGRITY: needs.native_integrity and pool.physical,
        Capability.EVICTION: needs.eviction,
        Capability.FORK_SAFE: needs.fork_safe,
        Capability.PEERS: needs.peers and pool.physical,
    }
    return [capability for capability, asked in wanted.items() if asked]


def _transfer_mode(case: _Evaluation) -> tuple[TransferMode, ObjectUnit, str, bool]:
    """Choose how bytes move, how much goes under a key, and why.

    A whole page under one key needs the fewest requests. Where its pieces are
    scattered and the backend takes one piece at a time, a smaller unit that is
    contiguous keeps zero copy; where there is none, the page is staged. So is
    what the deployment wants staged, and memory that the backend could not
    reach by itself: staging memory is the core's own, and can be registered.
    """
    if not case.pool.physical:
        return TransferMode.NONE, ObjectUnit.PAGE, "", False
    if not case.verdict(Capability.ZERO_COPY):
        return TransferMode.STAGED, ObjectUnit.PAGE, "", False
    asked = _why_staged(case)
    if asked:
        return TransferMode.STAGED, ObjectUnit.PAGE, asked, False
    any_memory = case.verdict(Capability.HOST_ALLOCATOR)
    away = _out_of_reach(case, any_memory)
    if away:
        return TransferMode.STAGED, ObjectUnit.PAGE, away, False
    allocate = not any_memory and case.needs.allocator is None
    if case.verdict(Capability.MULTI_BUFFER):
        return *_unstaged(case, ObjectUnit.PAGE), allocate
    return _one_piece(case, allocate=allocate)


def _unstaged(
    case: _Evaluation, unit: ObjectUnit
) -> tuple[TransferMode, ObjectUnit, str]:
    """Return the mode of a pool that is not staged, with its unit and note."""
    if case.needs.staging is not StagingPolicy.SAFE:
        notes = []
        if case.verdict(Capability.ZERO_COPY).support is Support.EMULATED:
            notes.append(f"{case.manifest.name} itself copies pages once")
        if case.needs.staging is StagingPolicy.LOADS:
            notes.append("loads are staged")
        return TransferMode.ZERO_COPY, unit, ", ".join(notes)
    note = f"{case.manifest.name} leaves the pages of abandoned calls alone"
    return TransferMode.GATED, unit, note


def _why_staged(case: _Evaluation) -> str:
    """Return why the deployment has pages staged that need not be, or ""."""
    if case.needs.staging is StagingPolicy.ALWAYS:
        return "asked for"
    if case.needs.staging is not StagingPolicy.SAFE:
        return ""
    verdicts = map(case.verdict, (Capability.GATED_GET, Capability.GATED_PUT))
    return ", ".join(verdict.reason for verdict in verdicts if not verdict)


def _out_of_reach(case: _Evaluation, any_memory: Verdict) -> str:
    """Return why a backend cannot reach the engine's memory, or ""."""
    registration = case.verdict(Capability.MEMORY_REGISTRATION)
    if not registration:
        return registration.reason
    brought = case.needs.allocator in (None, case.manifest.name)
    return "" if any_memory or brought else any_memory.reason


def _one_piece(
    case: _Evaluation, *, allocate: bool
) -> tuple[TransferMode, ObjectUnit, str, bool]:
    """Choose for a backend that takes one piece of memory at a time."""
    if case.check is IntegrityCheck.TRAILER:
        # A trailer is one more piece, so the object has to be put together.
        return (
            TransferMode.STAGED,
            ObjectUnit.PAGE,
            "a trailer is a second piece",
            False,
        )
    for unit in ObjectUnit:
        cut = attrs.evolve(case.pool, object_unit=unit)
        if count_buffers(cut, case.shard) == 1 and case.verdict(
            Capability.BATCH_SIZE, cut
        ):
            return *_unstaged(case, unit), allocate
    note = f"{count_buffers(case.pool, case.shard)} pieces a page"
    return TransferMode.STAGED, ObjectUnit.PAGE, note, False


def from_manifest(  # noqa: C901, PLR0911, PLR0912 - one answer for each capability
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    manifest: Manifest,
    needs: RouteRequirements,
) -> Verdict:
    """Judge a capability by the manifest alone."""
    who = manifest.name
    mine = manifest.kinds.get(pool.kind, KindSupport())
    match capability:
        case Capability.STORE if pool.kind not in manifest.kinds:
            return Verdict(Support.NO, f"{who} does not take {pool.kind} pools")
        case Capability.HIT_POLICY:
            return _among(who, pool.hit_policy, mine.hit_policies, "hit policy")
        case Capability.LAYOUT:
            return _among(who, pool.layout, mine.layouts, "layout")
        case Capability.SHARDING:
            return _among(who, pool.sharding, mine.shardings, "sharding")
        case Capability.OBJECT_SIZE:
            largest = max(stored.nbytes for stored in stored_objects(pool, shard))
            return _limit(
                who, largest, manifest.max_object_bytes, "objects of {} bytes"
            )
        case Capability.BATCH_SIZE:
            count = len(stored_objects(pool, shard))
            return _limit(who, count, manifest.max_batch_keys, "batches of {} keys")
        case Capability.KEY_SIZE:
            longest = max(
                len(stored.coordinate) for stored in stored_objects(pool, shard)
            )
            # Digest, slash, page hash, full stop, coordinate.
            chars = HASH_CHARS + 1 + HASH_CHARS + 1 + longest
            return _limit(who, chars, manifest.max_key_bytes, "keys of {} bytes")
        case Capability.SHARING:
            return _reach(who, manifest.sharing, needs.sharing, "shares with")
        case Capability.DURABILITY:
            return _reach(who, manifest.durability, needs.durability, "outlives")
        case Capability.CLEAR_REACH:
            if manifest.clear_reach <= needs.clear_reach:
                return Verdict(Support.NATIVE, f"{who} clears {manifest.clear_reach}")
            return Verdict(
                Support.NO,
                f"{who} clears as far as {manifest.clear_reach}, "
                f"not only {needs.clear_reach}",
            )
        case Capability.MEMORY_REGISTRATION:
            return _registration(manifest, needs)
        case Capability.HOST_ALLOCATOR:
            return _allocator(manifest)
        case Capability.GATED_GET | Capability.GATED_PUT:
            return _gated(capability, pool, manifest)
        case Capability.PEERS if not needs.registrable:
            return Verdict(Support.NO, f"{who} cannot register this memory for peers")
        case _:
            return _graded(capability, pool, manifest)


def _with_trailer(pool: PoolSpec, shard: Shard, manifest: Manifest) -> Verdict:
    largest = (
        max(stored.nbytes for stored in stored_objects(pool, shard)) + TRAILER_BYTES
    )
    limit = manifest.max_object_bytes
    return _limit(
        manifest.name, largest, limit, "objects of {} bytes, trailer included"
    )


def _graded(capability: Capability, pool: PoolSpec, manifest: Manifest) -> Verdict:
    grade = manifest.support(capability, pool.kind)
    who, word = manifest.name, capability.value.replace("_", " ")
    says = {
        Support.UNDECLARED: f"{who} says nothing about {word}",
        Support.NO: f"{who} has no {word}",
    }.get(grade, f"{who} has {word}")
    return Verdict(grade, f"{says} for {pool.kind} pools")


def _gated(capability: Capability, pool: PoolSpec, manifest: Manifest) -> Verdict:
    grade = manifest.support(capability, pool.kind)
    call = capability.value.removeprefix("gated_")
    does = "leaves alone" if grade else "may touch"
    return Verdict(grade, f"{manifest.name} {does} the pages of an abandoned {call}")


def _registration(manifest: Manifest, needs: RouteRequirements) -> Verdict:
    if not manifest.memory_registration:
        return Verdict(Support.NATIVE, f"{manifest.name} registers no memory")
    if needs.registrable:
        return Verdict(Support.NATIVE, f"{manifest.name} registers memory")
    return Verdict(Support.NO, f"{manifest.name} cannot register this memory")


def _allocator(manifest: Manifest) -> Verdict:
    who = manifest.name
    if not manifest.host_allocator:
        return Verdict(Support.NATIVE, f"{who} takes any memory")
    return Verdict(Support.NO, f"not in memory of {who}'s allocator")


def _among(who: str, wanted: StrEnum, known: frozenset[StrEnum], what: str) -> Verdict:
    if wanted in known:
        return Verdict(Support.NATIVE, f"{who} takes {what} {wanted}")
    return Verdict(Support.NO, f"{who} does not take {what} {wanted}")


def _limit(who: str, wanted: int, limit: int, what: str) -> Verdict:
    if limit and wanted > limit:
        return Verdict(
            Support.NO,
            f"{who} takes {what.format(limit)} at most, this pool needs {wanted}",
        )
    return Verdict(Support.NATIVE, f"{who} takes {what.format(wanted)}")


def _reach(who: str, has: Scope, wanted: Scope, verb: str) -> Verdict:
    if has >= wanted:
        return Verdict(Support.NATIVE, f"{who} {verb} {has}")
    return Verdict(Support.NO, f"{who} {verb} {has}, not {wanted}")
