"""The pools of one engine process, attached to the plugins that store them.

The engine registers its pools in a burst, and draft pools afterwards. The
burst is planned and attached as one. A pool that comes later is attached by
itself, in a namespace that names the first one: see decision record 25.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import Attachment, HitPolicy, Outcome, RouteRequirements, Scope
from kvdock.config import Drafts
from kvdock.errors import KvdockError, NoRoute
from kvdock.events import Event, PageEvent, PagesRestored
from kvdock.namespace import configuration_digest
from kvdock.pools import sharing_limits
from kvdock_sglang.pool_names import EnginePool

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvdock import Dock, Namespace, Plan, PoolSpec, Shard
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.pays import LoadPolicy
    from kvdock_sglang.host_pools import HostPool
    from kvdock_sglang.namespace import Ranks
    from kvdock_sglang.settings import Configuration

log = logging.getLogger("kvdock.sglang")

_SEVERAL_HOSTS = (
    "The ranks of this engine run on several hosts and hold the same pages, so all of "
    "them must find what one stores. Where every host reaches the same store (a root "
    'on a network file system), set "shared_storage": true.'
)


@attrs.frozen(eq=False)
class AttachedHostPool:
    """One pool's way to its store.

    Args:
        attachment: Where it is attached; None for a draft that no plugin takes.
    """

    pool: HostPool
    attachment: Attachment | None

    @property
    def spec(self) -> PoolSpec:
        """Return what the pool is."""
        return self.pool.spec

    def lookup(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Return which pages could be loaded, bool (n,)."""
        if self.attachment is None:
            return np.ones(len(hashes), np.bool_)
        return self.attachment[self.spec.name].exists(hashes, deadline_s)

    def write(
        self, hashes: Sequence[str], pages: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Store pages; those of a draft that no plugin takes are skipped."""
        if self.attachment is None:
            return np.full(len(hashes), Outcome.OK, np.uint8)
        return self.attachment[self.spec.name].put(hashes, pages, deadline_s)

    def read(
        self, hashes: Sequence[str], pages: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Load pages; those of a draft that no plugin takes become zeros.

        What the memory held before belongs to another prefix. A draft model
        that sees zeros proposes worse tokens, and the target rejects them.
        """
        if self.attachment is not None:
            return self.attachment[self.spec.name].get(hashes, pages, deadline_s)
        nbytes = int(self.pool.region.object_bytes.sum())
        blank = np.zeros((len(hashes), nbytes), np.uint8)
        self.pool.region.scatter(pages, blank)
        return np.full(len(hashes), Outcome.OK, np.uint8)


@attrs.define(eq=False)
class Attachments:
    """Lanes of all pools of one engine process."""

    dock: Dock
    given: Configuration
    ranks: Ranks
    _spaces: Mapping[bool, Namespace] = attrs.field(factory=dict, init=False)
    _burst: Sequence[HostPool] = attrs.field(default=(), init=False)
    _late: tuple[HostPool, ...] = attrs.field(default=(), init=False)
    _attachments: tuple[Attachment, ...] = attrs.field(default=(), init=False)
    _by_name: Mapping[str, AttachedHostPool] = attrs.field(factory=dict, init=False)
    _changing: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def shard(self) -> Shard:
        """The slice of the model that this process owns."""
        return self.ranks.shard

    def attached_pool(self, name: str) -> AttachedHostPool | None:
        """Return an attached pool; None for one that was never registered."""
        return self._by_name.get(name)

    @property
    def pools(self) -> Mapping[str, AttachedHostPool]:
        """All pools by pool name."""
        return self._by_name

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """Those that are open, each with a namespace."""
        return self._attachments

    @property
    def pays(self) -> LoadPolicy | None:
        """What decides whether loading pays; None before the first burst, or if off."""
        first = next(iter(self._attachments), None)
        return first.pays if first is not None and first.pays.decides else None

    @property
    def digest(self) -> str:
        """The first burst's namespace, without its generation; "" before it."""
        first = next(iter(self._attachments), None)
        return configuration_digest(first.namespace_record) if first else ""

    def attach(
        self, pools: Sequence[HostPool], target: Namespace, drafts: Namespace
    ) -> Plan:
        """Attach the pools that the engine starts with.

        `pools` are the first burst, the anchor among them. `drafts` is the namespace of
        the pools of a draft model, which come later.

        Raises:
            NoRoute: If no plugin takes a pool that the model requires;
                the message is the route table.
            KvdockError: If a plugin rejects its memory or its settings.
        """
        self._spaces, self._burst = {False: target, True: drafts}, pools
        return self._attach(pools, target)

    def add(self, pool: HostPool) -> Plan | None:
        """Attach a pool that the engine registers later.

        It is the anchor of a namespace of its own: other pages say nothing
        about it. Its digest covers the first one, so what the pool belongs to
        is identified exactly as the target is.

        Returns:
            Its plan; None for a draft pool that is left out.

        Raises:
            NoRoute: If no plugin takes it, unless drafts are lenient.
            KvdockError: As for `attach`.
        """
        if not self._spaces:
            raise KvdockError(f"pool {pool.name!r} comes before the anchor")
        self._late = (*self._late, pool)
        beside = self._spaces[pool.spec.draft]
        space = attrs.evolve(
            beside,
            page_format=f"{beside.page_format} beside {self.digest}, "
            f"in order {pool.page_order}",
        )
        try:
            return self._attach([attrs.evolve(pool, spec=alone(pool.spec))], space)
        except NoRoute as error:
            if self.given.own.drafts is Drafts.STRICT or not pool.spec.draft:
                raise
            log.warning("pool %s is not stored: %s", pool.name, error)
            with self._changing:
                self._by_name = {
                    **self._by_name,
                    pool.name: AttachedHostPool(pool, None),
                }
            return None

    def next_generation(self, generation: str) -> Attachments:
        """Close these, and return the same pools attached in another generation.

        Raises:
            KvdockError: As for `attach` and `add`; these stay closed.
        """
        self.close()
        target, drafts = (
            attrs.evolve(space, generation=generation)
            for space in self._spaces.values()
        )
        opened = Attachments(self.dock, self.given, self.ranks)
        try:
            opened.attach(self._burst, target, drafts)
            for pool in self._late:
                opened.add(pool)
        except BaseException:
            opened.close()
            raise
        return opened

    def _attach(self, pools: Sequence[HostPool], space: Namespace) -> Plan:
        plan = self.routes([pool.spec for pool in pools])
        attachment = None
        if plan.accepted:
            attachment = Attachment.open(
                self.dock,
                plan,
                space,
                {pool.name: pool.region for pool in pools},
                self._settings_for(plan),
                core=self.given.core,
                process=self.ranks.process,
            )
        taken = {route.pool.name for route in plan.accepted}
        with self._changing:
            if attachment is not None:
                self._attachments = (*self._attachments, attachment)
            self._by_name = {
                **self._by_name,
                **{
                    pool.name: AttachedHostPool(
                        pool, attachment if pool.name in taken else None
                    )
                    for pool in pools
                },
            }
        log.info("kvdock stores these pools:\n%s", plan.explain())
        self._log_limits(pools)
        return plan

    def _log_limits(self, pools: Sequence[HostPool]) -> None:
        """Log in one line which pools other deployments will not find, and why."""
        limits = [
            limit
            for pool in pools
            for limit in sharing_limits(
                pool.spec,
                stages=self.ranks.pp_size,
                tp_size=self.shard.tp_size,
                share_tp=self.ranks.share_tp,
                packed_layers=pool.packed_draft_layers,
            )
        ]
        if limits:
            log.info("%s", "; ".join(map(str, limits)))

    def routes(self, specs: Sequence[PoolSpec]) -> Plan:
        """Choose a backend for every pool."""
        own = self.given.own
        names = {spec.name for spec in specs}
        sharing = self._sharing(specs)
        try:
            return self.dock.plan(
                specs,
                self.shard,
                [own.plugin] if own.plugin else [],
                tiers=self.given.tiers,
                overrides={n: to for n, to in own.routes.items() if n in names},
                strict=own.drafts is Drafts.STRICT,
                needs=RouteRequirements(
                    integrity=self.given.core.integrity,
                    sharing=sharing,
                    # So that the route table says what happens to the pages.
                    staging=self.given.core.calls.staging,
                    tenant_quotas=bool(self.given.core.tenants.rooms),
                ),
                settings=self.given.backends,
            )
        except NoRoute as error:
            if sharing is not Scope.CLUSTER:
                raise
            raise NoRoute(error.what, fix=f"{error.fix} {_SEVERAL_HOSTS}") from error

    def _sharing(self, specs: Sequence[PoolSpec]) -> Scope:
        """Return how far a store must reach for the ranks that share pages."""
        if self.shard.tp_size == 1:
            return Scope.NONE
        # One rank stores what several hold, and all of them look.
        widest = max(_holders(spec, self.shard) for spec in specs)
        far = widest > self.ranks.on_host and not self.given.own.shared_storage
        return Scope.CLUSTER if far else Scope.HOST

    def _settings_for(self, plan: Plan) -> dict[str, Mapping[str, object]]:
        used = plan.backends
        return {
            name: theirs for name, theirs in self.given.backends.items() if name in used
        }

    def notify(self, event: Event) -> None:
        """Notify observers of an event of the engine's."""
        for attachment in self._attachments[:1]:  # they have the same observers
            attachment.notify(event)

    def take_page_events(self) -> tuple[PageEvent, ...]:
        """Return what was stored, and what is gone, since the last call."""
        every = [attachment.take_page_events() for attachment in self._attachments[:1]]
        return every[0] if every else ()

    def notify_loaded(
        self, loaded: Mapping[str, Sequence[bool]], windows: Collection[str] = ()
    ) -> None:
        """Notify observers of what one call of the engine restored of a prefix.

        The engine loads the target first and what goes with it in calls of their own,
        so each call reports its own part of the prefix. `loaded` has for each pool
        which of its pages are loaded, in order; of `windows` only the end of the prefix
        was asked for.
        """
        attachments = self._attachments
        if not attachments:
            return
        pools = {name: self._by_name.get(name) for name in loaded}
        pages = {
            name: int(np.logical_and.accumulate(loaded[name]).sum())
            for name, attached_pool in pools.items()
            if attached_pool is not None
            and attached_pool.attachment is not None
            and loaded[name]
        }
        drafts = [
            pages.get(name, 0)
            for name, attached_pool in pools.items()
            if attached_pool is not None
            and attached_pool.spec.draft
            and name not in windows
        ]
        target = pages.get(EnginePool.KV, 0)
        awaited = target and any(one.spec.draft for one in self._by_name.values())
        draft = min(drafts) if drafts else 0 if awaited else None
        event = PagesRestored(pages=pages, target=target, draft=draft)
        attachments[0].notify(event)

    def clear(self) -> None:
        """Delete what this model and format stored, and nothing else.

        Attachments share the time that the core allows for one of them: the
        engine's scheduler waits.

        Raises:
            KvdockError: If a plugin failed; the others are cleared all the same.
        """
        deadline_s = self.given.core.deadlines.until("clear")
        failed = {
            f"{backend}: {outcome.name.lower()}"
            for attachment in self._attachments
            for backend, outcome in attachment.clear(
                max(0.0, deadline_s - time.monotonic())
            ).items()
            if outcome is not Outcome.OK
        }
        if failed:
            raise KvdockError(
                f"not everything is cleared ({', '.join(sorted(failed))})",
                fix="See why the plugin fails, then clear again.",
            )

    def close(self) -> None:
        """Close all attachments; safe to call twice.

        Attachments share the time that the core allows for one of them.
        """
        deadline_s = self.given.core.deadlines.until("close")
        with self._changing:
            attachments, self._attachments = self._attachments, ()
            self._by_name = {}
        for attachment in reversed(attachments):
            try:
                attachment.close(max(0.0, deadline_s - time.monotonic()))
            except KvdockError:
                log.exception("an attachment did not close")


def alone(spec: PoolSpec) -> PoolSpec:
    """Return a pool that comes late as the anchor of a namespace of its own."""
    # At once: an anchor with a window is rejected.
    return attrs.evolve(
        spec,
        anchor=True,
        required=True,
        hit_policy=HitPolicy.ALL_PAGES,
        window_pages=0,
        indices_from=None,
    )


def _holders(spec: PoolSpec, shard: Shard) -> int:
    """Return over how many neighbouring ranks the holders of one page reach."""
    ranks = [
        attrs.evolve(shard, tp_rank=rank, dcp_rank=rank % shard.dcp_size)
        for rank in range(shard.tp_size)
    ]
    writers = sum(map(spec.writes, ranks))
    if not spec.physical or writers == len(ranks):
        return 1
    # Ranks that hold the same heads are neighbours, others are not.
    return len(ranks) // writers if spec.by_head else len(ranks)
