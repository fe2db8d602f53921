"""Moving the pages of several pools as one: what an engine holds.

Write: sidecars first, the anchor last, so a visible prefix is a complete one.
Read: the anchor first, then sidecars for the pages that were really read. A
short pool cuts the prefix and never misaligns it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.batches import Batch, BatchResult, Operation, Outcome, Outcomes
from kvdock.errors import AttachError, KvdockError, RegionError, nearest
from kvdock.hits import Bools, Hits, evaluate
from kvdock.hookspecs import AttachConfig
from kvdock.keys import (
    Namespace,
    build_keys,
    check_hashes,
    check_suffixes,
    namespace_digest,
    namespace_record,
)
from kvdock.regions import Int64s, Region
from kvdock.routing import Path, Plan

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvdock.dock import Backend, Dock
    from kvdock.pools import PoolSpec

log = logging.getLogger("kvdock")

NO_PAGE = -1
"""Page index of a position for which a pool has no page."""


@attrs.frozen(eq=False)
class Moved:
    """What became of the pages of one call.

    Args:
        pages: Length of the prefix that is complete: stored or loaded by all
            required pools.
        outcomes: Pool name to uint8 (n,), an `Outcome` for each position; a
            position without a page is ABSENT.
        nbytes: Pool name to bytes moved for pages that are OK.
    """

    pages: int
    outcomes: Mapping[str, Outcomes] = attrs.field(repr=False)
    nbytes: Mapping[str, int]


@attrs.frozen(eq=False)
class _Berth:
    """One pool of an attachment, with all that its batches need."""

    pool: PoolSpec
    backend: Backend
    handle: Any
    region: Region
    suffixes: tuple[str, ...]
    staged: bool
    writes: bool


@attrs.define(eq=False)
class Attachment:
    """Pools of one engine process, attached to the backends of a plan."""

    plan: Plan
    namespace: str
    record: Mapping[str, object] = attrs.field(repr=False)
    _berths: dict[str, _Berth] = attrs.field(repr=False)

    @classmethod
    def open(
        cls,
        dock: Dock,
        plan: Plan,
        namespace: Namespace,
        regions: Mapping[str, Region],
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> Attachment:
        """Give a plan's backends the memory of its pools.

        Args:
            dock: The loaded backends.
            plan: Where each pool goes.
            namespace: What the stored bytes belong to.
            regions: Pool name to its memory, for every accepted pool.
            settings: Backend name to its settings.

        Raises:
            KvdockError: If anything is missing or refused; what was attached
                before is let go again.
        """
        settings = settings or {}
        used = {route.backend for route in plan.routes if route.backend}
        for name in settings:
            if name not in used:
                raise AttachError(
                    f"settings are given for backend {name!r}, which has no pool",
                    fix=nearest(name, used),
                )
        for route in plan.accepted:
            if route.pool.name not in regions:
                raise AttachError(f"pool {route.pool.name!r} was given no memory")
        for route in plan.refused:
            log.warning("pool %s is not stored: %s", route.pool.name, route.reason)
        record = namespace_record(namespace, [route.pool for route in plan.routes])
        digest = namespace_digest(record)
        configs = {
            name: AttachConfig(
                settings=dock.backends[name].settings(settings.get(name)),
                namespace=digest,
                namespace_record=record,
                shard=plan.shard,
            )
            for name in sorted(used)
        }
        attachment = cls(plan, digest, record, {})
        try:
            for route in plan.accepted:
                name = str(route.backend)
                attachment._attach(
                    route.pool,
                    dock.backends[name],
                    regions[route.pool.name],
                    configs[name],
                    staged=route.path is Path.STAGED,
                )
            attachment._check_keys()
        except BaseException:
            attachment.close()
            raise
        return attachment

    def _attach(
        self,
        pool: PoolSpec,
        backend: Backend,
        region: Region,
        config: AttachConfig,
        *,
        staged: bool,
    ) -> None:
        if region.objects != pool.objects(config.shard):
            # The route cut pages into other objects than the engine did.
            region = Region.of(pool, config.shard, region.owners, region.pages)
        try:
            handle = backend.register_pool(pool, region, config)
        except KvdockError as error:
            raise AttachError(
                f"backend {backend.name!r} refuses pool {pool.name!r}: {error.what}",
                fix=error.fix,
            ) from error
        self._berths[pool.name] = _Berth(
            pool=pool,
            backend=backend,
            handle=handle,
            region=region,
            suffixes=backend.key_suffix(pool, config.shard),
            staged=staged,
            writes=pool.writes(config.shard),
        )

    def _check_keys(self) -> None:
        for name in {berth.backend.name for berth in self._berths.values()}:
            check_suffixes(
                name,
                [
                    (berth.pool, berth.suffixes, berth.region.objects)
                    for berth in self._berths.values()
                    if berth.backend.name == name
                ],
            )

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the attachment."""
        self.close()

    def close(self) -> None:
        """Release every pool; the attachment then stores and finds nothing."""
        while self._berths:
            _, berth = self._berths.popitem()
            try:
                berth.backend.release(berth.handle)
            except Exception:
                log.exception("backend %s failed to release", berth.backend.name)

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The attached pools, anchor first."""
        return tuple(berth.pool for berth in self._berths.values())

    def exists(self, hashes: Sequence[str]) -> Hits:
        """Find out which prefixes of these pages could be restored.

        Args:
            hashes: Page hashes of a prefix, in order.
        """
        check_hashes(hashes)
        there = {name: self._ask(berth, hashes) for name, berth in self._berths.items()}
        return evaluate(self._required_first(), there, len(hashes))

    def put(self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]) -> Moved:
        """Store pages: sidecars first, the anchor last.

        A page of the anchor is written only if every required sidecar page
        that was given for its position is stored.

        Args:
            hashes: Page hashes, in order.
            pages: Pool name to int64 (n,), the page index of each position;
                `NO_PAGE` where the pool has none. A pool that shares another
                one's indices may be left out.
        """
        where = self._places(hashes, pages)
        outcomes: dict[str, Outcomes] = {}
        nbytes: dict[str, int] = {}
        good = np.ones(len(hashes), np.bool_)
        for berth in self._anchor_last():
            own = where[berth.pool.name]
            given = own != NO_PAGE
            chosen = np.flatnonzero(given & good if berth.pool.anchor else given)
            result = self._move(Operation.PUT, berth, hashes, own, chosen)
            outcomes[berth.pool.name] = result
            stored = result == Outcome.OK
            nbytes[berth.pool.name] = int(stored.sum()) * self._page_bytes(berth)
            if berth.pool.required:
                good &= stored | ~given if not berth.pool.anchor else stored
        return Moved(int(np.logical_and.accumulate(good).sum()), outcomes, nbytes)

    def get(self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]) -> Moved:
        """Load pages: the anchor first, then sidecars for what was read.

        Args:
            hashes: Page hashes of a prefix that `exists` called restorable.
            pages: As for `put`. A pool with a trailing window needs its page
                only at the positions of that window.

        Returns:
            `pages` is the longest prefix that is whole in memory: all of it,
            or a shorter one that the loaded pages still allow.
        """
        where = self._places(hashes, pages)
        outcomes: dict[str, Outcomes] = {}
        nbytes: dict[str, int] = {}
        loaded: dict[str, Bools] = {}
        reach = len(hashes)
        for berth in reversed(self._anchor_last()):
            own = where[berth.pool.name]
            chosen = np.flatnonzero(own[:reach] != NO_PAGE)
            result = self._move(Operation.GET, berth, hashes, own, chosen)
            outcomes[berth.pool.name] = result
            ok = result == Outcome.OK
            loaded[berth.pool.name] = ok
            nbytes[berth.pool.name] = int(ok.sum()) * self._page_bytes(berth)
            if berth.pool.anchor:
                reach = int(np.logical_and.accumulate(ok).sum())
        hits = evaluate(self._required_first(), loaded, len(hashes))
        return Moved(hits.best, outcomes, nbytes)

    def clear(self) -> Mapping[str, Outcome]:
        """Forget everything of this namespace, and nothing else.

        Returns:
            Backend name to what became of it.
        """
        cleared: dict[str, Outcome] = {}
        for berth in self._berths.values():
            if berth.backend.name not in cleared:
                batch = Batch(Operation.CLEAR, [f"{self.namespace}/"])
                result = self._call(berth, batch)
                cleared[berth.backend.name] = Outcome(int(result.outcomes[0]))
        return cleared

    def _anchor_last(self) -> list[_Berth]:
        return sorted(self._berths.values(), key=lambda berth: berth.pool.anchor)

    def _required_first(self) -> tuple[PoolSpec, ...]:
        if not self._berths:
            raise KvdockError("the attachment is closed")
        return self.pools

    def _page_bytes(self, berth: _Berth) -> int:
        return int(berth.region.object_bytes.sum())

    def _places(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> dict[str, Int64s]:
        """Return each pool's page index for each position."""
        self._required_first()
        check_hashes(hashes)
        for name in pages:
            if name not in self._berths and name not in {
                route.pool.name for route in self.plan.refused
            }:
                raise RegionError(
                    f"pages are given for {name!r}, which is not attached",
                    fix=nearest(name, self._berths),
                )
        places: dict[str, Int64s] = {}
        for name, berth in self._berths.items():
            source = berth.pool.indices_from
            given = pages.get(name, pages.get(source) if source else None)
            if given is None:
                if berth.pool.physical:
                    raise RegionError(f"no pages are given for pool {name!r}")
                given = np.zeros(len(hashes), np.int64)
            own = np.asarray(given, np.int64)
            if own.shape != (len(hashes),):
                raise RegionError(
                    f"pool {name!r}: {own.shape} page indices for {len(hashes)} hashes"
                )
            if berth.pool.physical:
                berth.region.check(own[own != NO_PAGE])
            places[name] = own
        return places

    def _ask(self, berth: _Berth, hashes: Sequence[str]) -> Bools:
        keys = build_keys(self.namespace, hashes, berth.suffixes)
        result = self._call(berth, Batch(Operation.EXISTS, keys))
        there = _by_page(result.outcomes, len(berth.suffixes)) == Outcome.OK
        return cast("Bools", there)

    def _move(
        self,
        operation: Operation,
        berth: _Berth,
        hashes: Sequence[str],
        own: Int64s,
        chosen: Int64s,
    ) -> Outcomes:
        """Move the chosen positions of one pool; outcome per position."""
        outcomes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
        if not len(chosen):
            return outcomes
        if operation is Operation.PUT and not berth.writes:
            # Another rank stores these very bytes.
            outcomes[chosen] = Outcome.OK
            return outcomes
        keys = build_keys(self.namespace, [hashes[i] for i in chosen], berth.suffixes)
        indices = own[chosen]
        if berth.staged:
            result = self._staged(operation, berth, keys, indices)
        else:
            if berth.pool.physical:
                addresses, sizes = berth.region.addresses(indices)
            else:
                addresses = sizes = np.zeros((len(keys), 0), np.int64)
            result = self._call(berth, Batch(operation, keys, addresses, sizes))
        outcomes[chosen] = _by_page(result.outcomes, len(berth.suffixes))
        return outcomes

    def _staged(
        self, operation: Operation, berth: _Berth, keys: list[str], indices: Int64s
    ) -> BatchResult:
        """Move pages through one contiguous copy."""
        each = berth.region.object_bytes
        rows = np.empty((len(indices), int(each.sum())), np.uint8)
        if operation is Operation.PUT:
            berth.region.gather(indices, rows)
        starts = np.concatenate([[0], np.cumsum(each)[:-1]])
        at = rows.ctypes.data + np.arange(len(indices))[:, None] * rows.shape[1]
        addresses = (at + starts).reshape(-1, 1).astype(np.int64)
        sizes = np.tile(each, len(indices)).reshape(-1, 1)
        result = self._call(berth, Batch(operation, keys, addresses, sizes))
        if operation is Operation.GET:
            good = _by_page(result.outcomes, len(each)) == Outcome.OK
            berth.region.scatter(indices[good], rows[good])
        return result

    def _call(self, berth: _Berth, batch: Batch) -> BatchResult:
        """Run a batch in pieces that the backend takes; failure is a miss."""
        limit = berth.backend.manifest.max_batch_keys or max(1, len(batch))
        parts: list[BatchResult] = []
        for start in range(0, len(batch), limit):
            piece = batch.part(start, start + limit)
            try:
                parts.append(berth.backend.batch_io(berth.handle, piece))
            except Exception:
                # Storage never stops an engine: these pages are a miss.
                log.exception(
                    "backend %s: %s of %d keys of pool %s failed",
                    berth.backend.name,
                    batch.operation,
                    len(piece),
                    berth.pool.name,
                )
                parts.append(BatchResult.all(piece, Outcome.ERROR))
        if len(parts) == 1:
            return parts[0]
        return BatchResult(
            np.concatenate([np.zeros(0, np.uint8), *(p.outcomes for p in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(p.nbytes for p in parts)]),
        )


def _by_page(outcomes: Outcomes, objects: int) -> Outcomes:
    """Fold the outcomes of a page's objects: the worst one counts."""
    if objects == 1:
        return outcomes
    return cast("Outcomes", outcomes.reshape(-1, objects).max(axis=1))
