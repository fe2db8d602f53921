"""Attachment: store and load the pages of several pools as one.

Write: sidecars first, the anchor last, so a visible prefix is a complete one.
Read: the anchor first, then sidecars for the pages that were really read. A
short pool cuts the prefix and never misaligns it.

No method raises because of storage, and none takes longer than its deadline
plus a moment: what fails is a miss with an outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NoReturn, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import all_of, count_of
from kvdock.batch import Operation, Outcome
from kvdock.closing import ClosedAfterUse
from kvdock.config.core import CoreSettings
from kvdock.config.tenants import DEFAULT_TENANT
from kvdock.errors import AttachError, KvdockError, did_you_mean
from kvdock.events import PagesRestored, stored_for
from kvdock.hits import Hits, evaluate, leading
from kvdock.keys import check_hashes, hashes_of_tenant
from kvdock.pays.policy import LoadPolicy
from kvdock.plugin.hookspecs import AttachConfig
from kvdock.resilience.workers import CallRejected
from kvdock.retention import CallTimes, Retention, RetentionAnswer, combined
from kvdock.transfer.page_indices import unanswered
from kvdock.transfer.result import NO_PAGE, TransferResult
from kvdock.transfer.setup import AttachedBackends, attach_plan

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, OutcomeArray
    from kvdock.dock import Dock
    from kvdock.events import Event, PageEvent
    from kvdock.geometry.region import Region
    from kvdock.namespace import Namespace
    from kvdock.plugin.hookspecs import Finding
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.executor import Job
    from kvdock.routing.plan import Plan
    from kvdock.transfer.attached_pool import AttachedPool
    from kvdock.transfer.call_pools import CallPools
    from kvdock.transfer.leases import PageLeases
    from kvdock.transfer.placement import Placement


_OK = int(Outcome.OK)


@attrs.define(eq=False)
class Attachment(ClosedAfterUse):
    """Pools of one engine process, attached to the backends of a plan."""

    plan: Plan
    core: CoreSettings = attrs.field(repr=False)
    _backends: AttachedBackends = attrs.field(repr=False)
    _close_peers: Callable[[float], bool] | None = attrs.field(
        init=False, default=None, repr=False
    )
    pays: LoadPolicy = attrs.field(init=False, repr=False)
    """Decides for an engine how much of a prefix it loads."""

    @pays.default
    def _policy(self) -> LoadPolicy:
        return LoadPolicy(self.core.pays, self.notify)

    @classmethod
    def open(
        cls,
        dock: Dock,
        plan: Plan,
        namespace: Namespace,
        regions: Mapping[str, Region],
        settings: Mapping[str, Mapping[str, object]] | None = None,
        *,
        core: CoreSettings | None = None,
        process: str = "",
        trial: bool = False,
    ) -> Attachment:
        """Give a plan's backends the memory of its pools.

        Args:
            dock: The loaded backends.
            plan: Where each pool goes.
            namespace: What the stored bytes belong to.
            regions: Pool name to its memory, for every accepted pool.
            settings: Backend name to its settings.
            core: Deadlines, breakers and bounds; None for the defaults. The
                observers that it names must be around the backends already,
                see `Dock.observe`.
            process: A name for this process among those of its deployment
                with the same settings, for what a backend keeps locally.
            trial: Whether to try the backends out, with nothing brought along
                that others could come to use.

        Raises:
            KvdockError: If anything is missing or rejected; what was attached
                before is released.
        """
        core = core or CoreSettings()
        times = core.retention
        config = AttachConfig(
            process=process,
            trial=trial,
            max_age_s=times.max_age,
            erase_within_s=times.erase_within,
        )
        given = settings or {}
        backends = attach_plan(
            dock, plan, namespace, regions, given, core, config=config
        )
        attachment = cls(plan, core, backends)
        try:
            if core.self_test:
                attachment._demand_self_test()
        except BaseException:
            attachment.close()
            raise
        return attachment

    def _demand_self_test(self) -> None:
        wrong = [one for one in self.self_test() if not one.ok]
        if wrong:
            what = "; ".join(f"{one.what} ({one.hint})" for one in wrong)
            raise AttachError(f"the self test failed: {what}")

    def __getitem__(self, pool: str) -> AttachedPool:
        """Return one attached pool.

        Raises:
            KvdockError: If it is not attached.
        """
        pools = self.pools_by_name
        if pool not in pools:
            raise KvdockError(
                f"pool {pool!r} is not attached", fix=did_you_mean(pool, pools)
            )
        return pools[pool]

    def close(self, timeout_s: float | None = None) -> bool:
        """Release every pool; the attachment then stores and finds nothing.

        Ends within `timeout_s` or `core.deadlines.close`. A backend with a
        call that has not ended is released by that call's end; until then
        `wait_idle` is false and the pools' memory must stay.

        Returns:
            Whether every call has ended.
        """
        deadline_s = self.core.deadlines.until("close", timeout_s)
        quiet = self._close_peers is None or self._close_peers(deadline_s)
        return self._backends.close(deadline_s) and quiet

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is running, abandoned ones and copies included."""
        end = time.monotonic() + timeout_s
        copier = self._backends.copier
        if copier is not None and not copier.wait_idle(end):
            return False
        channels = self._backends.channels.values()
        return all(
            channel.wait_idle(max(0.0, end - time.monotonic())) for channel in channels
        )

    @property
    def namespace(self) -> str:
        """The digest that begins every key."""
        return self._backends.namespace

    @property
    def namespace_record(self) -> Mapping[str, object]:
        """Return what the namespace covers, readable."""
        return self._backends.record

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The attached pools, anchor first."""
        return tuple(attached.pool for attached in self._backends.pools.values())

    def leases(self, pool: str) -> PageLeases:
        """Return the page leases of a pool.

        An engine checks them before it reuses a page, and counts its own
        device copies in them.
        """
        return self[pool].leases

    def breakers(self) -> Mapping[str, Mapping[Operation, str]]:
        """Return the state of every breaker, by backend and operation."""
        return {
            name: {op: str(one.state) for op, one in channel.breakers.items()}
            for name, channel in self._backends.channels.items()
        }

    def self_test(self) -> tuple[Finding, ...]:
        """Store, find, load, compare and drop one page of every pool."""
        timeout_s = self.core.deadlines.get
        return tuple(
            finding
            for attached in self.pools_by_name.values()
            for placement in attached.placements
            for finding in placement.health_check.self_test(timeout_s)
        )

    def exists(self, hashes: Sequence[str]) -> Hits:
        """Find out which prefixes of these pages could be restored.

        Args:
            hashes: Page hashes of a prefix, in order.
        """
        calls = self._backends.prefix_calls or self._no_prefixes()
        check_hashes(hashes)
        deadline_s = self.core.deadlines.until(Operation.EXISTS)
        there: dict[str, BoolArray] = {}

        def find(name: str, job: Job | None) -> None:
            there[name] = calls.attached[name].find(hashes, deadline_s, job)

        def give_up(name: str) -> None:
            near = calls.attached[name].nearest
            late = near.reject(Operation.EXISTS, hashes, Outcome.TIMEOUT)
            there[name] = late == _OK

        if calls.only:
            find(calls.only, None)
        else:
            self._in_turn(calls, calls.anchor_first, deadline_s, find, give_up)
        return evaluate(calls.specs, there, len(hashes))

    def put(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        *,
        keep_s: float | None = None,
        expire_s: float | None = None,
    ) -> TransferResult:
        """Store pages: sidecars first, the anchor last.

        A page of the anchor is written only if every required sidecar page
        that was given for its position is stored.

        Args:
            hashes: Page hashes, in order.
            pages: Pool name to int64 (n,), the page index of each position;
                `NO_PAGE` where the pool has none. A pool that shares another
                one's indices may be left out.
            keep_s: Do not evict them for so many seconds, if the budget has room:
                `TransferResult.retained` says for which pages.
            expire_s: Do not serve them any longer than so many seconds. A pool
                whose backend cannot do that refuses its pages.

        Raises:
            KvdockError: On bad input.
        """
        calls = self._backends.prefix_calls or self._no_prefixes()
        where = calls.resolve(hashes, pages)
        timed = keep_s is not None or expire_s is not None
        asked = None
        if timed:
            asked = Retention.lasting(keep_s, expire_s, self.core.retention.max_age)
        answers: list[OutcomeArray] = []
        deadline_s = self.core.deadlines.until(Operation.PUT)
        outcomes: dict[str, OutcomeArray] = {}
        nbytes: dict[str, int] = {}
        good: BoolArray = ~np.zeros(len(hashes), np.bool_)

        def move(name: str, job: Job | None, late: OutcomeArray | None = None) -> None:
            nonlocal good
            attached, own = calls.attached[name], where[name]
            pool = attached.pool
            whole = not pool.anchor or all_of(good)
            wanted = own if whole else np.where(good, own, NO_PAGE)
            times = CallTimes(asked) if asked else None
            there = None
            if expire_s is not None and not all(
                one.retains for one in attached.placements
            ):
                # What is there keeps its trailer, and with that its own time.
                there = attached.find(hashes, deadline_s, job)
            result = late
            if result is None:
                result = attached.transfer(
                    Operation.PUT, hashes, wanted, deadline_s, times, job
                )
            outcomes[name] = result
            stored = result == _OK
            if times is not None and timed:
                mine = attached.answers_of_put(hashes, own, stored, times, deadline_s)
                if there is not None:
                    mine[there] = RetentionAnswer.UNSUPPORTED
                answers.append(mine)
            count = count_of(stored)
            nbytes[name] = int(count) * attached.region.page_bytes
            if pool.required and count < len(stored):
                good &= stored if pool.anchor else stored | (own == NO_PAGE)

        if calls.only:
            move(calls.only, None)
        else:
            self._in_turn(
                calls, calls.anchor_last, deadline_s, move,
                lambda name: move(name, None, unanswered(where[name])[1]),
            )  # fmt: skip
        retained = combined(answers, len(hashes)) if timed else None
        return TransferResult(leading(good), outcomes, nbytes, where, retained)

    def retain(self, hashes: Sequence[str], keep_s: float) -> OutcomeArray:
        """Promise not to evict stored pages for a time, all pools of them.

        A page that has a longer promise keeps that one.

        Args:
            hashes: Page hashes of a prefix, in order: the budget is given to the
                first ones first.
            keep_s: For how many seconds from now.

        Returns:
            uint8 (n,), a `RetentionAnswer` for each page.

        Raises:
            KvdockError: On bad input.
        """
        return self._retain(hashes, Retention.lasting(keep_s=keep_s))

    def expire(self, hashes: Sequence[str], after_s: float) -> OutcomeArray:
        """Let stored pages expire after a time; as `retain`.

        They are not served from then on, by any tier, and their bytes are
        overwritten within `core.retention.erase_within` by a backend that keeps
        times itself. A promise ends with its page.
        """
        return self._retain(hashes, Retention.lasting(expire_s=after_s))

    def _retain(self, hashes: Sequence[str], asked: Retention) -> OutcomeArray:
        pools = (self._backends.prefix_calls or self._no_prefixes()).attached
        check_hashes(hashes)
        deadline_s = self.core.deadlines.until(Operation.RETAIN)
        if not asked:
            return combined([], len(hashes))
        answers = {
            name: attached.retain(hashes, asked, deadline_s)
            for name, attached in pools.items()
        }
        anchor = next(n for n, one in pools.items() if one.pool.anchor)
        # A sidecar may lack pages that no window of it needs.
        found = combined(answers.values(), len(hashes))
        gone = answers[anchor] == RetentionAnswer.ABSENT
        return np.where(gone, np.uint8(RetentionAnswer.ABSENT), found)

    def get(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> TransferResult:
        """Load pages: the anchor first, then sidecars for what was read.

        Args:
            hashes: Page hashes of a prefix that `exists` called restorable.
            pages: As for `put`. A pool with a trailing window needs its page
                only at the positions of that window.

        Returns:
            `pages` is the longest prefix that is whole in memory: all of it,
            or a shorter one that the loaded pages still allow.
        """
        calls = self._backends.prefix_calls or self._no_prefixes()
        where = calls.resolve(hashes, pages)
        deadline_s = self.core.deadlines.until(Operation.GET)
        outcomes: dict[str, OutcomeArray] = {}
        loaded: dict[str, BoolArray] = {}
        nbytes: dict[str, int] = {}
        reach = count = len(hashes)
        whole = True  # no pool cuts a prefix of which it has all pages

        def move(name: str, job: Job | None, late: OutcomeArray | None = None) -> None:
            nonlocal reach, whole
            attached, wanted = calls.attached[name], where[name]
            if reach < count:
                wanted = wanted.copy()
                wanted[reach:] = NO_PAGE
            result = late
            if result is None:
                result = attached.transfer(
                    Operation.GET, hashes, wanted, deadline_s, job=job
                )
            outcomes[name] = result
            good = loaded[name] = result == _OK
            right = int(count_of(good))
            nbytes[name] = right * attached.region.page_bytes
            whole = whole and right == count
            if attached.pool.anchor and right < count:
                reach = leading(good)

        if calls.only:
            move(calls.only, None)
        else:
            self._in_turn(
                calls, calls.anchor_first, deadline_s, move,
                lambda name: move(name, None, unanswered(where[name])[1]),
            )  # fmt: skip
        best = count if whole else evaluate(calls.specs, loaded, count).best
        if self._backends.listening:
            self.notify_restored(loaded, best)
        return TransferResult(best, outcomes, nbytes, where)

    def _in_turn(
        self,
        calls: CallPools,
        order: Sequence[str],
        deadline_s: float,
        move: Callable[[str, Job | None], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Move the pools of a call: in one job, where their backend is the same.

        Args:
            calls: The attached pools.
            order: Their names, in order.
            deadline_s: Of the call, on `time.monotonic()`'s clock.
            move: Moves one of them.
            give_up: Takes one that was not moved by the deadline.
        """
        names = list(order)
        if len(names) > 1 and calls.channel is not None:

            def work(job: Job) -> None:
                while names:
                    move(names[0], job)
                    del names[0]

            channel = calls.channel
            ran = channel.executor.work(work, channel.latest(deadline_s))
            if ran.abandoned:
                give_up(names.pop(0))
            elif ran.error is not None and not isinstance(ran.error, CallRejected):
                raise ran.error
        for name in names:
            move(name, None)

    def for_tenant(self, tenant: str) -> TenantCalls:
        """Return the calls for a listed tenant, whose pages are found for no other.

        Args:
            tenant: Its name; "default" is that of the namespace's salt.

        Raises:
            KvdockError: If it is not listed.
        """
        tenants = self.core.tenants
        if tenant != DEFAULT_TENANT and tenant not in tenants:
            raise KvdockError(
                f"tenant {tenant!r} is not listed", fix=did_you_mean(tenant, tenants)
            )
        salt = "" if tenant == DEFAULT_TENANT else tenants[tenant]
        return TenantCalls(self, tenants.number(tenant), salt)

    def take_page_events(self) -> tuple[PageEvent, ...]:
        """Return which pages were stored, and which are gone, since the last call.

        Empty unless `core.page_events` is set. Never waits for a backend: what it
        has evicted is asked for in the background, once a second at most, and
        comes with a later call. Backends that do not report it are silent about
        evictions.
        """
        events = self._backends.page_events
        if events is None:
            return ()
        return events.take(one.poll_removed for one in self.pools_by_name.values())

    def delete(
        self, hashes: Sequence[str], timeout_s: float | None = None
    ) -> OutcomeArray:
        """Delete pages: all pools of them, from all tiers.

        Ends within `timeout_s` or `core.deadlines.delete`. A promise ends with its
        page. What another process stores meanwhile may stay.

        Returns:
            uint8 (n,), the worst `Outcome` of each page: OK where no tier has it any
            more, or ever had it.

        Raises:
            KvdockError: On bad input.
        """
        deadline_s = self.core.deadlines.until(Operation.DELETE, timeout_s)
        # The anchor first: no prefix is found that lacks its sidecars.
        outcomes = [
            one.delete(hashes, deadline_s) for one in self._calls.attached.values()
        ]
        return cast("OutcomeArray", np.maximum.reduce(outcomes))

    def clear(
        self, timeout_s: float | None = None, backends: Collection[str] | None = None
    ) -> Mapping[str, Outcome]:
        """Delete everything of this namespace, and nothing else.

        Ends within `timeout_s` or `core.deadlines.clear`. With `backends`, it deletes
        from these alone.

        Returns:
            Backend name to the outcome.
        """
        cleared: dict[str, Outcome] = {}
        deadline_s = self.core.deadlines.until(Operation.CLEAR, timeout_s)
        copier = self._backends.copier
        paused: AbstractContextManager[None] = nullcontext()
        if copier is not None:
            # A copy under way, or of a page that a far tier still has, would bring
            # back what is cleared.
            half = self.core.deadlines.until(Operation.CLEAR, timeout_s, factor=0.5)
            paused = copier.paused(half)
        tiers: dict[str, Placement] = {}
        for attached in self.pools_by_name.values():
            for placement in attached.placements:
                if backends is None or placement.backend in backends:
                    tiers.setdefault(placement.backend, placement)
        with paused:
            for name, placement in tiers.items():
                cleared[name] = placement.clear(deadline_s)
            if copier is not None:
                # As `AttachedPool.delete`: a copy of another process.
                for name, placement in [*tiers.items()][:-1]:
                    cleared[name] = max(cleared[name], placement.clear(deadline_s))
        return cleared

    def open_to_peers(self, close: Callable[[float], bool]) -> None:
        """Note what sends these pools' pages to peers; `PeerTransfers` calls it.

        Args:
            close: Ends all that goes to peers or comes from them, before the
                backends are released: from a deadline on `time.monotonic()`'s
                clock, to whether no byte can come or go any more.

        Raises:
            KvdockError: If there is one already.
        """
        if self._close_peers is not None:
            raise KvdockError(
                "this attachment has transfers to peers already",
                fix="Make one PeerTransfers for each attachment, and share it.",
            )
        self._close_peers = close

    def notify_restored(self, loaded: Mapping[str, BoolArray], prefix: int) -> None:
        """Notify observers how much of a prefix each pool has.

        `get` calls it itself. An engine that loads pool by
        pool calls it once the prefix is loaded.

        Args:
            loaded: Pool name to whether each page is whole in memory, bool
                (n,), n >= `prefix`. A pool that was not loaded is left out.
            prefix: Pages of the target's restored prefix.
        """
        channel = next(iter(self._backends.channels.values()), None)
        if channel is None or not channel.observed:
            return
        drafts = [pool.name for pool in self.pools if pool.draft]
        with_draft = np.full(prefix, all(name in loaded for name in drafts))
        for name in drafts:
            with_draft &= loaded.get(name, with_draft)[:prefix]
        channel.notify(
            PagesRestored(
                pages={name: int(ok[:prefix].sum()) for name, ok in loaded.items()},
                target=prefix,
                draft=int(with_draft.sum()) if drafts else None,
            )
        )

    def notify(self, event: Event) -> None:
        """Notify observers of an event of the engine's adapter."""
        self._backends.notify(event)

    @property
    def pools_by_name(self) -> Mapping[str, AttachedPool]:
        """The attached pools, anchor first.

        Raises:
            KvdockError: If the attachment is closed.
        """
        return self._calls.attached

    @property
    def _calls(self) -> CallPools:
        """The attached pools as calls need them.

        Raises:
            KvdockError: If the attachment is closed.
        """
        if self._backends.calls is None:
            raise KvdockError("the attachment is closed")
        return self._backends.calls

    def _no_prefixes(self) -> NoReturn:
        """Say why prefixes of the attached pools cannot be evaluated here.

        Raises:
            KvdockError: The engine evaluates hits itself, or the attachment is closed.
        """
        if self._calls.engine_hits:
            raise KvdockError(
                "the engine of these pools evaluates hits itself",
                fix="Use attachment[pool].exists, put and get, or a TransferManager.",
            )
        raise KvdockError("the attachment is closed")


@attrs.frozen(eq=False)
class TenantCalls:
    """What an attachment stores and finds for one tenant, in its room.

    What is stored for one is found for no other. `Attachment.for_tenant` makes it; its
    calls are those of the attachment.

    Args:
        calls: The attachment.
        number: That of the tenant.
        salt_digest: Mixed into page hashes; "" for pages of the namespace's own salt.
    """

    _calls: Attachment = attrs.field(repr=False)
    number: int
    _salt_digest: str = attrs.field(repr=False)

    def exists(self, hashes: Sequence[str]) -> Hits:
        """Find out which prefixes could be restored; as `Attachment.exists`."""
        return self._calls.exists(self._named(hashes))

    def put(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        *,
        keep_s: float | None = None,
        expire_s: float | None = None,
    ) -> TransferResult:
        """Store pages; as `Attachment.put`."""
        names = self._named(hashes)
        with stored_for(self.number):
            return self._calls.put(names, pages, keep_s=keep_s, expire_s=expire_s)

    def get(
        self, hashes: Sequence[str], pages: Mapping[str, npt.ArrayLike]
    ) -> TransferResult:
        """Load pages; as `Attachment.get`."""
        with stored_for(self.number):  # nearer copies too
            return self._calls.get(self._named(hashes), pages)

    def retain(self, hashes: Sequence[str], keep_s: float) -> OutcomeArray:
        """Promise not to evict stored pages; as `Attachment.retain`."""
        return self._calls.retain(self._named(hashes), keep_s)

    def expire(self, hashes: Sequence[str], after_s: float) -> OutcomeArray:
        """Let stored pages expire; as `Attachment.expire`."""
        return self._calls.expire(self._named(hashes), after_s)

    def delete(
        self, hashes: Sequence[str], timeout_s: float | None = None
    ) -> OutcomeArray:
        """Delete pages; as `Attachment.delete`."""
        return self._calls.delete(self._named(hashes), timeout_s)

    def _named(self, hashes: Sequence[str]) -> Sequence[str]:
        if not self._salt_digest:
            return hashes
        return hashes_of_tenant(hashes, self._salt_digest)
