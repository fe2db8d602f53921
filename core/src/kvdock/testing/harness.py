"""A pool attached to the backend under test, and what must hold of it.

A rig talks to the plugin as the core does, hook by hook, but keeps nothing
back: no breaker, no retry and no second check hides what the plugin did.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from kvdock.batch import Batch, BatchResult, MemoryHold, Operation, Outcome
from kvdock.config.tenants import NO_TENANT, Tenants
from kvdock.keys import build_keys, check_suffixes
from kvdock.namespace import Namespace, namespace_digest, namespace_record
from kvdock.plugin.hookspecs import AttachConfig, HostMemory
from kvdock.plugin.manifest import Scope
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import LIMITS, RouteRequirements, TransferMode
from kvdock.testing.cases import one_sample, plain_sample
from kvdock.testing.heartbeat import Beats
from kvdock.testing.memory import BLANK, Bring, PageMemory, bringer, plain, staging_of
from kvdock.testing.routes import ANCHOR, route_pools
from kvdock.testing.scale import Scale
from kvdock.testing.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.geometry.region import Region
    from kvdock.plugin.backend import Backend
    from kvdock.plugin.store import WholeStore
    from kvdock.pools.enums import PoolKind
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.plan import Route
    from kvdock.testing.samples import Sample


PATIENCE_S = 30.0
"""Deadline of calls that are not about deadlines, and limit of a release."""

FILL_S = 8.0
"""How long a store is filled with pages that only have to be many."""

FILL_LEAST = 1100
"""How many there are in any case: more than libraries list or delete at once."""

SOON_S = 1.0
"""How long what one handle stored may take to be found by another."""

HANG_S = 10.0
"""How long after its deadline a call counts as one that never returns."""


def becomes(holds: Callable[[], Any], patience_s: float) -> bool:
    """Wait for something to hold; return whether it does in time."""
    until_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


@attrs.define(eq=False)
class Setup:
    """One attached pool on one rank, with memory of its own."""

    backend: Backend
    pool: PoolSpec
    config: AttachConfig
    memory: PageMemory
    region: Region
    staging: npt.NDArray[np.uint8] | None
    suffixes: tuple[str, ...]
    store: WholeStore
    own: tuple[int, int]
    bring: Bring = attrs.field(repr=False)
    lent: list[HostMemory] = attrs.field(repr=False)
    watchdog: Watchdog = attrs.field(repr=False)
    scale: Scale
    tenant: int = NO_TENANT
    """Whom it stores pages for."""
    attached: bool = True
    holds: list[MemoryHold] = attrs.field(factory=list, init=False, repr=False)

    @property
    def objects(self) -> int:
        """Stored objects of one page."""
        return len(self.suffixes)

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages, page-major."""
        return build_keys(self.config.namespace, hashes, self.suffixes)

    def call(self, batch: Batch) -> BatchResult:
        """Run one batch in pieces that the plugin takes, as the core does."""
        limit = self.backend.manifest.max_batch_keys or len(batch)
        parts = [
            self.call_once(batch.part(start, start + limit))
            for start in range(0, len(batch), max(1, limit))
        ] or [self.call_once(batch)]
        if len(parts) == 1:
            return parts[0]
        kept = [part.kept for part in parts if part.kept is not None]
        return BatchResult(
            np.concatenate([part.outcomes for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            kept=np.concatenate(kept) if kept else None,
        )

    def call_once(self, batch: Batch) -> BatchResult:
        """Run one batch as it is.

        Raises:
            DidNotReturn: If the call does not come back, long after its time.
        """
        patience_s = self.scale.seconds(PATIENCE_S)
        result = self.watchdog.run(
            lambda: self.backend.batch_io(self.store, batch),
            min(batch.remaining_s(), patience_s) + self.scale.seconds(HANG_S),
            f"a call of {batch.operation} with {len(batch)} keys and "
            f"{min(batch.remaining_s(), patience_s):.3g} s to its deadline",
        )
        if result.hold is not None:
            self.holds.append(result.hold)
        return result

    def until(self, usual_s: float = PATIENCE_S) -> float:
        """Return a deadline, on `time.monotonic()`'s clock."""
        return time.monotonic() + self.scale.seconds(usual_s)

    def places(self, count: int) -> Int64Array:
        """Return page indices for `count` pages, in no handy order."""
        first, last = self.own
        assert count <= last - first, "the rig has too few pages"
        return first + np.random.default_rng(count).permutation(last - first)[:count]

    def batch(
        self,
        operation: Operation,
        hashes: Sequence[str],
        places: Int64Array,
        deadline_s: float | None = None,
    ) -> tuple[Batch, npt.NDArray[np.uint8] | None]:
        """Build a batch that moves pages, and its staging rows if it has any."""
        keys = self.keys(hashes)
        deadline = self.until() if deadline_s is None else deadline_s
        if not self.pool.physical:
            none = np.zeros((len(keys), 0), np.int64)
            return Batch(operation, keys, none, none, deadline), None
        if self.staging is None:
            addresses, sizes = self.region.addresses(places)
            return Batch(operation, keys, addresses, sizes, deadline), None
        each = self.region.object_bytes
        rows = self.staging[self.own[0] :][: len(places)]
        rows[:] = BLANK
        if operation is Operation.PUT:
            self.region.gather(places, rows)
        starts = np.concatenate([[0], np.cumsum(each)[:-1]])
        at = rows.ctypes.data + np.arange(len(places))[:, None] * rows.shape[1]
        addresses = (at + starts).reshape(-1, 1).astype(np.int64)
        sizes = np.tile(each, len(places)).reshape(-1, 1)
        return Batch(operation, keys, addresses, sizes, deadline), rows

    def put(
        self, hashes: Sequence[str], *, seed: int = 0, deadline_s: float | None = None
    ) -> OutcomeArray:
        """Store the content of page hashes; return outcomes, uint8 (pages, objects).

        Asserts that the engine's memory is only read, then overwrites it: a
        plugin that still needs it afterwards stores wrong bytes.
        """
        places = self.places(len(hashes))
        self.memory.blank(*self.own)
        for place, page in zip(places, hashes, strict=True):
            self.memory.write(int(place), page, seed)
        batch, _rows = self.batch(Operation.PUT, hashes, places, deadline_s)
        result = self.call(attrs.evolve(batch, tenant=self.tenant))
        for place, page in zip(places, hashes, strict=True):
            for stored in self.region.objects:
                assert self.memory.holds(int(place), page, stored, seed), (
                    f"put changed the memory of page {place} that it had to read"
                )
        self.memory.check_untouched(map(int, places), *self.own)
        self.memory.blank(*self.own)
        return cast("OutcomeArray", result.outcomes.reshape(-1, self.objects))

    def get(
        self, hashes: Sequence[str], *, seed: int = 0, deadline_s: float | None = None
    ) -> OutcomeArray:
        """Load pages into blank memory; return outcomes, uint8 (pages, objects).

        Asserts that every object that is OK has its own bytes in its own
        place, and that no memory other than these pages was written.
        """
        places = self.places(len(hashes))
        self.memory.blank(*self.own)
        batch, rows = self.batch(Operation.GET, hashes, places, deadline_s)
        result = self.call(batch)
        outcomes = result.outcomes.reshape(-1, self.objects)
        if rows is not None:
            good = (outcomes == Outcome.OK).all(axis=1)
            self.region.scatter(places[good], rows[good])
        for row, (place, page) in enumerate(zip(places, hashes, strict=True)):
            for at, stored in enumerate(self.region.objects):
                if outcomes[row, at] != Outcome.OK or (
                    rows is not None and not good[row]
                ):
                    continue
                assert self.memory.holds(int(place), page, stored, seed), (
                    f"wrong bytes: key {row * self.objects + at} of {len(batch)} was "
                    f"answered OK, but page {place} does not hold {stored.coordinate}"
                )
        self.memory.check_untouched(map(int, places), *self.own)
        return cast("OutcomeArray", outcomes)

    def stored(self, hashes: Sequence[str], *, seed: int = 0) -> None:
        """Store pages and assert that every object was taken."""
        outcomes = self.put(hashes, seed=seed)
        assert (outcomes == Outcome.OK).all(), (
            f"put of {len(hashes)} pages into an empty store was answered "
            f"{spelled(outcomes)}"
        )

    def loaded(self, hashes: Sequence[str], *, seed: int = 0) -> None:
        """Load pages and assert that every object came."""
        outcomes = self.get(hashes, seed=seed)
        assert (outcomes == Outcome.OK).all(), (
            f"get of {len(hashes)} stored pages was answered {spelled(outcomes)}"
        )

    def fill(self, hashes: Sequence[str]) -> Sequence[str]:
        """Store many pages of the same bytes, which nothing looks at.

        Returns:
            Those that were stored: fewer than given where a store takes long for each.
        """
        end = self.until(FILL_S)
        done = 0
        while done < len(hashes) and (done < FILL_LEAST or time.monotonic() < end):
            pages = hashes[done : done + FILL_LEAST]
            one, _rows = self.batch(Operation.PUT, pages[:1], self.places(1))
            batch = attrs.evolve(
                one,
                keys=self.keys(pages),
                addresses=np.tile(one.addresses, (len(pages), 1)),
                sizes=np.tile(one.sizes, (len(pages), 1)),
            )
            result = self.call(batch)
            assert result.ok.all(), (
                f"put of {len(pages)} pages was answered {spelled(result.outcomes)}"
            )
            done += len(pages)
        return hashes[:done]

    def kept(self, hashes: Sequence[str], *, seed: int = 0) -> None:
        """Store pages and load them."""
        self.stored(hashes, seed=seed)
        self.loaded(hashes, seed=seed)

    def loaded_soon(self, hashes: Sequence[str]) -> None:
        """Load pages that another handle stored; it may take a moment."""
        found = self.exists_soon(hashes)
        assert found.all(), (
            f"{(~found).sum()} of {len(hashes)} pages that another handle stored are "
            f"not found after {self.scale.seconds(SOON_S):.0f} s"
        )
        self.loaded(hashes)

    def exists_soon(self, hashes: Sequence[str]) -> BoolArray:
        """Ask until every page is there, for a moment at most."""
        becomes(lambda: self.exists(hashes).all(), self.scale.seconds(SOON_S))
        return self.exists(hashes)

    def exists(self, hashes: Sequence[str]) -> BoolArray:
        """Return which pages are there whole, bool (pages,)."""
        batch = Batch(Operation.EXISTS, self.keys(hashes), deadline_s=self.until())
        outcomes = self.call(batch).outcomes.reshape(-1, self.objects)
        return cast("BoolArray", (outcomes == Outcome.OK).all(axis=1))

    def delete(self, hashes: Sequence[str]) -> OutcomeArray:
        """Forget pages; return uint8 (pages, objects), outcomes."""
        batch = Batch(Operation.DELETE, self.keys(hashes), deadline_s=self.until())
        return cast("OutcomeArray", self.call(batch).outcomes.reshape(-1, self.objects))

    def clear(self) -> Outcome:
        """Forget the namespace; return what became of that."""
        head = f"{self.config.namespace}/"
        batch = Batch(Operation.CLEAR, [head], deadline_s=self.until())
        return Outcome(int(self.call(batch).outcomes[0]))

    def seen(self) -> list[bytes]:
        """Return the bytes of all memory that the plugin knows."""
        if self.staging is not None:
            return [self.staging.tobytes()]
        return [block.tobytes() for block in self.memory.blocks]

    def divided(self, count: int) -> list[Setup]:
        """Return rigs on the same handle, each with pages of its own.

        For threads: memory that two of them wrote would prove nothing.
        """
        each = self.memory.pages // count
        return [
            attrs.evolve(self, own=(at * each, (at + 1) * each)) for at in range(count)
        ]

    def release(self) -> None:
        """Release the pool, once."""
        if self.attached:
            self.attached = False
            patience_s = self.scale.seconds(PATIENCE_S)
            close = self.store.close
            del self.store  # a plugin may watch who still uses it
            self.watchdog.run(close, patience_s, "close()")
            self.give_back()

    def give_back(self) -> None:
        """Give back what the plugin brought, once."""
        while self.lent:
            self.lent.pop().give_back()


def spelled(outcomes: OutcomeArray) -> str:
    """Write outcomes in words with their counts, for messages."""
    codes, counts = np.unique(outcomes, return_counts=True)
    return ", ".join(
        f"{Outcome(int(code)).name} x {count}"
        for code, count in zip(codes, counts, strict=True)
    )


def tightened(route: Route) -> bool:
    """Return whether a backend itself takes less than its manifest says."""
    return any(
        capability in LIMITS and not verdict
        for option in route.options
        for capability, verdict in option.verdicts
    )


@attrs.define(eq=False)
class Harness:
    """Attaches pools to the backend under test and releases them."""

    plugin: str
    settings: Mapping[str, object]
    backend: Backend
    salt: str = attrs.field(factory=lambda: uuid4().hex)
    """Keeps the namespaces of this harness to itself in a shared store."""
    tidy: bool = False
    """Whether to clear those namespaces at the end."""
    scale: Scale = attrs.field(factory=Scale)
    """How slow the store is."""
    large_objects: bool = True
    """Whether objects of many MiB are to be moved."""
    stays_s: float = 3.0
    """How long pages are left alone where nothing is evicted."""
    watchdog: Watchdog = attrs.field(factory=Watchdog)
    """Where its calls run."""
    beats: Beats = attrs.field(factory=Beats)
    """For how long other threads could not run meanwhile."""
    _rigs: list[Setup] = attrs.field(factory=list)
    _spaces: dict[str, tuple[PoolSpec, AttachConfig]] = attrs.field(factory=dict)

    def over(self, settings: Mapping[str, object]) -> Harness:
        """Return a harness like this one over another store."""
        return attrs.evolve(
            self,
            settings=settings,
            salt=uuid4().hex,
            watchdog=Watchdog(),
            rigs=[],
            spaces={},
        )

    def routes(
        self,
        pools: Sequence[PoolSpec],
        shard: Shard | None = None,
        **needs: Any,  # noqa: ANN401 - as `RouteRequirements` takes them
    ) -> tuple[Route, ...]:
        """Ask the router for pools that lie where the plugin wants them."""
        return route_pools(
            self.backend,
            pools,
            shard or Shard(),
            RouteRequirements(**{"allocator": self.backend.name} | needs),
            self.backend.settings(self.settings),
        )

    def attach(
        self,
        pools: Sequence[PoolSpec],
        shard: Shard | None = None,
        *,
        model: str = "model-a",
        pages: int = 32,
        like: Setup | None = None,
        tenants: Tenants | None = None,
        **needs: Any,  # noqa: ANN401 - as `RouteRequirements` takes them
    ) -> tuple[Setup, ...]:
        """Attach pools of one engine process, with one client for all.

        The namespace is that of `like`, if given, and the times.

        Raises:
            AssertionError: If a pool finds no route that the manifest allows.
        """
        shard = shard or Shard()
        routes = self.routes(pools, shard, **needs)
        for route in routes:
            self._demand(route, pools, shard)
        # The namespace is about the pools as described, not as routed.
        space = Namespace(model=model, salt=self.salt)
        record = namespace_record(space, [ANCHOR, *pools])
        if like:
            record = dict(like.config.namespace_record)
        config = AttachConfig(
            settings=self.backend.settings(self.settings),
            namespace=namespace_digest(record),
            namespace_record=record,
            shard=shard,
            max_age_s=like.config.max_age_s if like else 0.0,
            erase_within_s=like.config.erase_within_s if like else 60.0,
            tenants=tenants or Tenants(),
        )
        with self.beats.excused():
            rigs = tuple(
                self._attach(
                    # Optional for the router, which returns rejections as rows.
                    attrs.evolve(route.pool, required=pool.required),
                    config,
                    pages,
                    staged=route.mode is TransferMode.STAGED,
                )
                for route, pool in zip(routes, pools, strict=True)
            )
        laws = [(setup.pool, setup.suffixes, setup.region.objects) for setup in rigs]
        check_suffixes(self.backend.name, laws)
        return rigs

    def _demand(self, route: Route, pools: Sequence[PoolSpec], shard: Shard) -> None:
        """Insist on a route, unless the manifest itself rules the pool out."""
        if route.backend:
            return
        by_manifest = route_pools(
            self.backend,
            pools,
            shard,
            RouteRequirements(allocator=self.backend.name),
            judged=False,
        )
        for one in by_manifest:
            if not one.backend:
                pytest.skip(f"not declared: {one.reason}")
        if tightened(route):
            pytest.skip(f"with these settings it takes less: {route.reason}")
        pytest.fail(f"pool {route.pool.name!r} finds no route: {route.reason}")

    def sample(self, kind: PoolKind, **words: Any) -> Sample:  # noqa: ANN401 - as `Sample` takes them
        """Return a sample pool of a kind as the manifest declares it."""
        return plain_sample(self.backend.manifest, kind, **words)

    def _attach(
        self, pool: PoolSpec, config: AttachConfig, pages: int, *, staged: bool
    ) -> Setup:
        lent: list[HostMemory] = []
        bring = bringer(self.backend, config, lent)
        staged = staged and pool.physical
        memory = PageMemory.of(pool, config.shard, pages, plain if staged else bring)
        region = registered = memory.region()
        rows = None
        if staged:
            rows, registered = staging_of(region, bring)
        self.remember(pool, config)
        setup = Setup(
            backend=self.backend,
            pool=pool,
            config=config,
            memory=memory,
            region=region,
            staging=rows,
            suffixes=self.backend.key_suffix(pool, config.shard),
            store=self.backend.register_pool(pool, registered, config),
            own=(0, pages),
            bring=bring,
            lent=lent,
            watchdog=self.watchdog,
            scale=self.scale,
        )
        self._rigs.append(setup)
        return setup

    def rig(
        self,
        pool: PoolSpec,
        shard: Shard | None = None,
        *,
        model: str = "model-a",
        pages: int = 32,
        like: Setup | None = None,
        **more: Any,  # noqa: ANN401 - as `attach` takes them
    ) -> Setup:
        """Attach one pool; see `attach`."""
        return self.attach([pool], shard, model=model, pages=pages, like=like, **more)[
            0
        ]

    def any_sample(self) -> Sample:
        """Return a sample pool of the first declared kind that has bytes, or skip."""
        (case,) = one_sample(self.backend.manifest)
        if case.skip:
            pytest.skip(case.skip)
        found: Sample = case.value
        return found

    def any_pool(self, **words: Any) -> PoolSpec:  # noqa: ANN401 - as `Sample` takes them
        """Return a pool of that kind, in further words."""
        return self.sample(self.any_sample().kind, **words).pool()

    def plain(self, model: str = "model-a") -> Setup:
        """Attach such a pool."""
        return self.rig(self.any_sample().pool(), model=model)

    def forget(self, setup: Setup) -> None:
        """Drop a rig that its test has released."""
        self._rigs = [one for one in self._rigs if one is not setup]

    def remember(self, pool: PoolSpec, config: AttachConfig) -> None:
        """Count a namespace among those that are cleared at the end."""
        # Without the client that a plugin keeps there: it ends with its pools.
        config = attrs.evolve(config, shared={})
        self._spaces.setdefault(config.namespace, (pool, config))

    def close(self) -> None:
        """Release whatever is still attached, latest first; clear if tidy."""
        if self.tidy and self.backend.manifest.clear_reach is Scope.NAMESPACE:
            there = {
                setup.config.namespace: setup for setup in self._rigs if setup.attached
            }
            for namespace, (pool, config) in self._spaces.items():
                setup = there.get(namespace)
                (setup or self._attach(pool, config, 1, staged=False)).clear()
        while self._rigs:
            self._rigs.pop().release()
        self.watchdog.close()
