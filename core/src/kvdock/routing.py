"""Decide which backend keeps which pool, and say why.

Pure and deterministic: pools, a shard and manifests in, a plan out. A
backend's own judgement of a pool comes in as a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import attrs

from kvdock.errors import NoRoute, PluginError, nearest
from kvdock.manifest import Capability, KindSupport, Manifest, Support, Verdict
from kvdock.pools import Layout, ObjectUnit, PoolSpec, Shard, check_pools

Judge = Callable[[str, Capability, PoolSpec, Shard], Verdict | None]
"""(backend, capability, pool, shard) to its own verdict, or None."""


class Path(StrEnum):
    """How bytes get from the engine's memory to the backend."""

    ZERO_COPY = "zero copy"
    """The backend reads and writes the engine's memory."""
    STAGED = "staged"
    """One copy through a contiguous buffer."""
    NONE = "none"
    """The pool has no bytes, or no route."""


@attrs.frozen
class Option:
    """What one backend said to one pool."""

    backend: str
    verdicts: tuple[tuple[Capability, Verdict], ...]
    path: Path
    unit: ObjectUnit

    @property
    def accepted(self) -> bool:
        """Whether every capability that the pool needs is there."""
        return all(verdict for _, verdict in self.verdicts)

    @property
    def reason(self) -> str:
        """Why it was refused, or how it would be done."""
        refusals = [verdict.reason for _, verdict in self.verdicts if not verdict]
        if refusals:
            return "; ".join(refusals)
        emulated = [
            f"{capability} is emulated"
            for capability, verdict in self.verdicts
            if verdict.support is Support.EMULATED
        ]
        per = "one object a page"
        if self.unit is not ObjectUnit.PAGE:
            per = f"one object a {self.unit}"
        return "; ".join([f"{self.path}, {per}", *emulated])


@attrs.frozen
class Route:
    """Where one pool goes, with every backend's answer."""

    pool: PoolSpec
    backend: str | None
    path: Path
    reason: str
    options: tuple[Option, ...]


@attrs.frozen
class Plan:
    """Routes of all pools of an engine, anchor first."""

    shard: Shard
    routes: tuple[Route, ...]

    @property
    def anchor(self) -> Route:
        """The route of the pool whose pages define the prefix."""
        return next(route for route in self.routes if route.pool.anchor)

    @property
    def accepted(self) -> tuple[Route, ...]:
        """Routes that lead somewhere."""
        return tuple(route for route in self.routes if route.backend)

    @property
    def refused(self) -> tuple[Route, ...]:
        """Optional pools that no backend takes."""
        return tuple(route for route in self.routes if not route.backend)

    def explain(self) -> str:
        """Render the plan as a table of plain text, options included."""
        rows = [("POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY")]
        for route in self.routes:
            pool = route.pool
            rows.append(
                (
                    pool.name,
                    f"{pool.kind}{' draft' if pool.draft else ''}",
                    "anchor"
                    if pool.anchor
                    else ("required" if pool.required else "optional"),
                    f"{pool.page_bytes(self.shard)} B",
                    route.backend or "-",
                    route.reason,
                )
            )
            rows += [
                ("", "", "", "", f"not {option.backend}", option.reason)
                for option in route.options
                if option.backend != route.backend and route.backend
            ]
        return as_table(rows)


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns of text with two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def plan_routes(  # noqa: PLR0913 - the whole question in one call
    pools: Sequence[PoolSpec],
    shard: Shard,
    manifests: Mapping[str, Manifest],
    preference: Sequence[str] = (),
    *,
    overrides: Mapping[str, str] | None = None,
    strict: bool = False,
    judge: Judge | None = None,
) -> Plan:
    """Choose a backend for every pool.

    Args:
        pools: All pools of the engine, one of them the anchor.
        shard: The slice of the model that this process owns.
        manifests: What the installed backends declare, by name.
        preference: Backends to consider, best first; empty for all, those
            that need no staging first, then by name.
        overrides: Pool name to the one backend that may take it.
        strict: Treat optional pools as required.
        judge: A backend's own verdict, which comes before its manifest.

    Raises:
        NoRoute: If nobody takes a required pool; the message is the table.
        PluginError: If a backend is named that is not there.
        PoolError: If the pools do not belong together.
    """
    check_pools(pools)
    wanted = dict(overrides or {})
    for name in [*preference, *wanted.values()]:
        if name not in manifests:
            raise PluginError(
                f"no backend {name!r} is loaded", fix=nearest(name, manifests)
            )
    for name in wanted:
        if name not in {pool.name for pool in pools}:
            raise PluginError(
                f"a backend is chosen for pool {name!r}, which is not there",
                fix=nearest(name, [pool.name for pool in pools]),
            )
    ordered = sorted(pools, key=lambda pool: not pool.anchor)
    routes = tuple(
        _route(
            pool,
            shard,
            manifests,
            [wanted[pool.name]] if pool.name in wanted else list(preference),
            judge,
        )
        for pool in ordered
    )
    plan = Plan(shard, routes)
    lost = [r.pool.name for r in plan.refused if strict or r.pool.required]
    if lost:
        raise NoRoute(
            f"no backend takes {', '.join(lost)}\n{plan.explain()}\n",
            fix="Install a backend that does, or see `kvdock list`.",
        )
    return plan


def _route(
    pool: PoolSpec,
    shard: Shard,
    manifests: Mapping[str, Manifest],
    preference: Sequence[str],
    judge: Judge | None,
) -> Route:
    names = list(preference) or sorted(manifests)
    options = [_ask(pool, shard, manifests[name], judge) for name in names]
    takers = [option for option in options if option.accepted]
    if not preference:
        takers.sort(key=lambda option: option.path is Path.STAGED)
    if not takers:
        reason = "; ".join(f"{option.backend}: {option.reason}" for option in options)
        return Route(
            pool, None, Path.NONE, reason or "no backend is loaded", tuple(options)
        )
    best = takers[0]
    routed = attrs.evolve(pool, object_unit=best.unit)
    return Route(routed, best.backend, best.path, best.reason, tuple(options))


def _ask(
    pool: PoolSpec, shard: Shard, manifest: Manifest, judge: Judge | None
) -> Option:
    def own(capability: Capability) -> Verdict:
        said = judge(manifest.name, capability, pool, shard) if judge else None
        # A verdict of NO is false, and still the backend's own word.
        return _declared(capability, pool, shard, manifest) if said is None else said

    store = own(Capability.STORE)
    if not store:
        return Option(
            manifest.name,
            ((Capability.STORE, store),),
            Path.NONE,
            ObjectUnit.PAGE,
        )
    needs = [Capability.HIT_POLICY, Capability.LAYOUT, Capability.SHARDING]
    if pool.draft:
        needs.append(Capability.DRAFT)
    if len(pool.head_groups(shard)) > 1:
        needs.append(Capability.SPLIT_HEADS)
    path, unit = _path(pool, shard, own)
    sized = attrs.evolve(pool, object_unit=unit)
    verdicts = [(Capability.STORE, store)]
    verdicts += [(need, own(need)) for need in needs]
    verdicts.append(
        (
            Capability.OBJECT_SIZE,
            _declared(Capability.OBJECT_SIZE, sized, shard, manifest),
        )
    )
    return Option(manifest.name, tuple(verdicts), path, unit)


def _path(
    pool: PoolSpec, shard: Shard, own: Callable[[Capability], Verdict]
) -> tuple[Path, ObjectUnit]:
    """Choose how much goes under a key, and whether a copy is needed.

    A whole page under one key needs the fewest requests. Where its pieces are
    scattered and the backend takes one piece at a time, a smaller unit that is
    contiguous keeps zero copy; where there is none, the page is staged.
    """
    if not pool.physical:
        return Path.NONE, ObjectUnit.PAGE
    if not own(Capability.ZERO_COPY):
        return Path.STAGED, ObjectUnit.PAGE
    if own(Capability.MULTI_BUFFER):
        return Path.ZERO_COPY, ObjectUnit.PAGE
    for unit in ObjectUnit:
        if _contiguous(pool, shard, unit):
            return Path.ZERO_COPY, unit
    return Path.STAGED, ObjectUnit.PAGE


def _contiguous(pool: PoolSpec, shard: Shard, unit: ObjectUnit) -> bool:
    """Return whether an object of this unit is one run of bytes."""
    layers = len(pool.local_layers(shard))
    split = len(pool.head_groups(shard)) > 1
    one_part = unit is not ObjectUnit.PAGE or len(pool.parts) == 1
    one_layer = unit is ObjectUnit.LAYER or layers == 1
    if split and not (pool.layout is Layout.PAGE_HEAD and one_part):
        return False
    match pool.layout:
        case Layout.PAGE_OBJECT:
            # A smaller unit would cut what already lies together.
            return unit is ObjectUnit.PAGE
        case Layout.LAYER_FIRST:
            return one_part and one_layer
        case Layout.PAGE_FIRST | Layout.PAGE_HEAD:
            return one_part and (unit is not ObjectUnit.LAYER or layers == 1)
        case Layout.PAGE_FIRST_DIRECT:
            return one_part


def _declared(  # noqa: PLR0911 - one answer for each capability
    capability: Capability, pool: PoolSpec, shard: Shard, manifest: Manifest
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
            largest = max(stored.nbytes for stored in pool.objects(shard))
            limit = manifest.max_object_bytes
            if limit and largest > limit:
                return Verdict(
                    Support.NO,
                    f"{who} keeps objects of {limit} bytes at most, "
                    f"this pool's have {largest}",
                )
            return Verdict(Support.NATIVE, f"{largest} bytes an object")
        case _:
            grade = manifest.support(capability, pool.kind)
            word = capability.value.replace("_", " ")
            says = {
                Support.UNDECLARED: f"{who} says nothing about {word}",
                Support.NO: f"{who} has no {word}",
            }.get(grade, f"{who} has {word}")
            return Verdict(grade, f"{says} for {pool.kind} pools")


def _among(who: str, wanted: StrEnum, known: frozenset[StrEnum], what: str) -> Verdict:
    if wanted in known:
        return Verdict(Support.NATIVE, f"{who} takes {what} {wanted}")
    return Verdict(Support.NO, f"{who} does not take {what} {wanted}")
