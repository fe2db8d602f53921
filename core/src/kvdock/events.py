"""What observers get from the core: facts that no wrapper of a hook can see.

A call that was abandoned never comes back through a wrapper, a breaker that
is open makes no call, and a page that fails its trailer left the backend as a
success. Each of these is an event. Per batch at most, never per page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray
    from kvdock.batch import Operation, Outcome
    from kvdock.capacity import TenantUse
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

AUDITED = "kvdock-audit-"
"""Beginning of the salt, and of the id, of a request that an audit has computed anew:
engines do not store its pages, as no other request could find them."""

_request: ContextVar[str] = ContextVar("kvdock_request", default="")
TENANT: ContextVar[int] = ContextVar("kvdock_tenant", default=0)
"""The number of the tenant that the calls of a context store pages for."""


@contextmanager
def requested_by(request: str) -> Iterator[None]:
    """Say which request of the engine the storage calls inside belong to.

    Args:
        request: The engine's own id of it; "" for none.
    """
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def current_request() -> str:
    """Return the request that this thread's storage call belongs to, or ""."""
    return _request.get()


@contextmanager
def stored_for(tenant: int) -> Iterator[None]:
    """Say which tenant the storage calls inside store pages for.

    Args:
        tenant: Its number, see `kvdock.config.tenants`; 0 for that of the
            attachment's salt.
    """
    token = TENANT.set(tenant)
    try:
        yield
    finally:
        TENANT.reset(token)


@attrs.frozen(kw_only=True, cache_hash=True)
class Origin:
    """The attachment that an event comes from.

    Args:
        rank: The process among those of its deployment, such as "tp1" or
            "tp0-pp3"; "0" where there is only one.
        model: The model of its namespace.
        namespace: The digest of its namespace.
        configuration: The same without a generation of weights: an engine keeps it.
    """

    rank: str = "0"
    model: str = ""
    namespace: str = ""
    configuration: str = ""

    @classmethod
    def of(
        cls, shard: Shard, model: str, namespace: str, configuration: str = ""
    ) -> Origin:
        """Describe the attachment of a shard."""
        parts = [
            f"{axis}{getattr(shard, f'{axis}_rank')}"
            for axis in ("tp", "pp", "cp", "dcp")
            if getattr(shard, f"{axis}_size") > 1
        ]
        return cls(
            rank="-".join(parts) or "0",
            model=model,
            namespace=namespace,
            configuration=configuration or namespace,
        )


@attrs.frozen(kw_only=True)
class BatchEnded:
    """A batch as the engine sees it: verified, or given up.

    Nothing measures calls where every observer has an attribute `observes_calls` that
    is false.

    Args:
        nbytes: Bytes of the keys that are OK.
        seconds: From hand-over to the verified answer.
    """

    backend: str
    pool: str
    operation: Operation
    outcomes: Mapping[Outcome, int]
    nbytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class PagesAnswered:
    """Outcomes of the pages of a lookup, a load, a store, an expiry or a clear.

    For observers alone that have an attribute `observes_pages` which is true.

    Args:
        pool: Whose pages; of a clear, through which pool it was asked for.
        hashes: Their n page hashes; of a clear none, it is about all.
        outcomes: uint8 (n,), an `Outcome` for each; of a clear one.
        held_back: Why no backend was asked: "breaker" for one that is open, "queue"
            for a full queue of transfers, "expired" where their time is over, "pays"
            where the rest of a load is sooner computed, "key" where what is sealed
            cannot be opened or sealed, "full" for lack of room, "deleted" of a clear
            that nothing asked for; else "".
        slice_name: Which part of each page this process has, as a coordinate: ranks
            that divide a page in other ways store other objects.
        request: The engine's request, where that is known.
        expire_at: From when on what was stored is not served any more, in seconds
            since 1970; 0 where the call says no time.
    """

    backend: str
    pool: str
    operation: Operation
    hashes: Sequence[str] = attrs.field(repr=False)
    outcomes: OutcomeArray = attrs.field(repr=False, eq=False)
    held_back: str = ""
    slice_name: str = ""
    request: str = attrs.field(factory=current_request)
    expire_at: int = 0


@attrs.frozen(kw_only=True)
class LookupSkipped:
    """The engine did not ask storage for a request, or not for all that was found.

    Args:
        reason: "rate_limit" where too much is loaded already, "too_short" where the
            engine asks for no prefix of this length, "own_memory" where it has all but
            such a rest itself, "weights" where they were replaced, "pays" where
            computing was expected to be faster, "learn" where it was measured.
    """

    request: str
    reason: str


@attrs.frozen(kw_only=True)
class GenerationOpened:
    """Storage goes on after the weights of an engine were replaced.

    Args:
        kind: "run" where other engines may have the same, else "private".
    """

    kind: str


@attrs.frozen(kw_only=True)
class HostMemoryShared:
    """A request has waited for host memory to load into, or got less than it needed.

    Args:
        rows: Rows of host memory.
        pages: Rows that the whole prefix would take.
        waited_s: Seconds that it waited.
        computed_tokens: Tokens of the prefix that are computed for lack of room.
    """

    request: str
    rows: int
    pages: int
    waited_s: float
    computed_tokens: int


@attrs.frozen(kw_only=True)
class HintAnswered:
    """An action of a request's hints was read, or pages were answered.

    Args:
        action: The action's type; "other" for one that is not known, and "stored"
            for pages that requests with hints have stored since.
        outcome: "taken", "ignored", "malformed" or "dropped"; "" for pages.
        pages: How many of them were answered how: a `RetentionAnswer`; of a
            prefetch "queued", "present", "absent" or "unsupported".
    """

    request: str
    action: str
    action_id: str = ""
    outcome: str = ""
    pool: str = ""
    pages: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class LoadDecided:
    """A decision how much of a prefix that was found an engine loads.

    Args:
        choice: "all", "part", "compute", "explore" or "unknown", see
            `kvdock.pays.policy.Choice`.
        acted: Whether it was done; otherwise all that was found is loaded.
        found: Pages that could be restored.
        pages: Pages that are loaded, by this choice.
        wait_s: Expected seconds until the load has its turn.
        load_s: Expected seconds to load all that was found.
        compute_s: Expected seconds to compute all of the prompt that is not there.
        tokens_per_s: Tokens per second that the engine computes; 0 for unknown.
        curves: By backend and pool: seconds of a call, and bytes per second.
    """

    request: str
    choice: str
    acted: bool
    found: int
    pages: int
    wait_s: float
    load_s: float
    compute_s: float
    tokens_per_s: float = 0.0
    curves: Mapping[tuple[str, str], tuple[float, float]] = {}

    def __str__(self) -> str:
        """Render as one line."""
        curves = ", ".join(
            f"{backend} {pool} {latency_s * 1e3:.1f} ms + {rate / 1e6:.0f} MB/s"
            for (backend, pool), (latency_s, rate) in self.curves.items()
        )
        return (
            f"{self.choice}, {self.pages} of {self.found} pages: loading all takes "
            f"{self.load_s * 1e3:.0f} ms after {self.wait_s * 1e3:.0f} ms, computing "
            f"{self.compute_s * 1e3:.0f} ms "
            f"({self.tokens_per_s:.0f} tokens/s; {curves})"
        )


@attrs.frozen(kw_only=True)
class PagesCopied:
    """Pages were copied from one tier to another, or a copy was dropped.

    Args:
        promoted: Whether to a nearer tier, since they were used.
        outcomes: How many pages were "copied", "present" there already, "gone" from
            the source, "failed" to be stored, "dropped" because too much waits, or
            "incomplete": of an anchor whose sidecar was not copied.
        nbytes: Bytes of the pages that were copied.
        queued_bytes: Bytes of the pages that wait to be copied to the target.
    """

    pool: str
    source: str
    target: str
    promoted: bool
    outcomes: Mapping[str, int]
    nbytes: int
    queued_bytes: int


@attrs.frozen(kw_only=True)
class PoolsAttached:
    """The pools of an attachment, as they were routed; for the same observers.

    Args:
        record: What its namespace covers.
        pools: The attached pools, anchor first.
        refused: Name of each pool that is not stored to the reason.
        slice_names: Name of each pool to the part of a page that this process has.
        max_age_s: How long pages are served that say no time; 0 for ever.
    """

    record: Mapping[str, object] = attrs.field(repr=False)
    pools: tuple[PoolSpec, ...]
    refused: Mapping[str, str]
    slice_names: Mapping[str, str] = attrs.field(factory=dict)
    max_age_s: float = 0.0


@attrs.frozen
class PoolsDetached:
    """The attachment closes; what observers show of its state ends with it."""


@attrs.frozen(kw_only=True)
class BreakerMoved:
    """A breaker's state: "closed", "open" or "half-open".

    Sent when memory is attached, and at every change.
    """

    backend: str
    operation: Operation
    state: str


@attrs.frozen(kw_only=True)
class CallsBehind:
    """The number of abandoned calls changed.

    Abandoned calls, and probes, deletions and questions in the background.
    """

    backend: str
    calls: int


@attrs.frozen(kw_only=True)
class MemoryHeld:
    """The number of ended calls whose memory a backend still holds changed.

    Args:
        batches: How many batches, each with a lease on its pages.
    """

    backend: str
    batches: int


@attrs.frozen(kw_only=True)
class PoolRouted:
    """A pool was attached, or is not stored, for the reason given.

    Args:
        backend: The backend that keeps it, the nearest of several; "" for none.
        farther: The backends that keep it behind the nearest one.
    """

    pool: str
    backend: str
    enabled: bool
    reason: str
    farther: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class PagesRestored:
    """A load ended. Pages that are whole in memory, by pool.

    Args:
        pages: Pool name to pages loaded.
        target: Pages of the target's prefix.
        draft: Pages of it that have their draft pool too; None without one.
    """

    pages: Mapping[str, int]
    target: int
    draft: int | None


@attrs.frozen(kw_only=True)
class PagesHeld:
    """The number of pages of a pool's host memory that are under storage calls.

    Sent when memory is attached, when calls are abandoned, and when those end.
    """

    pool: str
    pages: int
    leased: int


@attrs.frozen(kw_only=True)
class StoreFilled:
    """The fill of a backend's store.

    Args:
        limit_bytes: What they may take; 0 where that is not known.
        failed_bytes: What could not be written and is set aside.
        promised_bytes: What is promised to be kept.
        promise_limit_bytes: What may be promised; 0 where nothing may.
        other_bytes: What other namespaces of the same place take.
        tenants: What listed tenants take, by name, where one has a quota.
    """

    backend: str
    used_bytes: int
    limit_bytes: int
    failed_bytes: int = 0
    promised_bytes: int = 0
    promise_limit_bytes: int = 0
    other_bytes: int = 0
    tenants: Mapping[str, TenantUse] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PluginLoaded:
    """A plugin is loaded in this process. Sent for each when memory is attached.

    Args:
        kind: "backend" or "observer".
        distribution: The distribution that brought it, or "unknown".
        path: The file of its code.
    """

    kind: str
    name: str
    distribution: str
    version: str
    path: str

    def __str__(self) -> str:
        """Render as one line."""
        return (
            f"{self.kind} {self.name}: {self.distribution} {self.version}, {self.path}"
        )


@attrs.frozen(kw_only=True)
class PageEvent:
    """Pages of one pool were stored in a backend, or are no longer there.

    Not for observers: an engine that has set `core.page_events` takes these from
    its attachment.

    Args:
        stored: Whether they were stored by this process; otherwise they were
            evicted, deleted as corrupt, or cleared.
        backend: Where. Each tier of a chain reports what it has itself.
    """

    pool: str
    stored: bool
    hashes: tuple[str, ...] = attrs.field(repr=False)
    backend: str


@attrs.define(eq=False)
class PageHomes:
    """Where stored pages are, so that a router is told of each of them once.

    Routers know neither tiers nor their names: some drop an event that has one, and
    some count announcements. So a page is announced when the first tier has it and
    removed when the last one has lost it, as local while any local tier has it.

    Args:
        limit: Most pages of each pool; the oldest are announced as removed.
    """

    limit: int
    _tiers: dict[str, dict[str, set[str]]] = attrs.field(factory=dict, init=False)

    def moved(
        self, event: PageEvent, remote: Collection[str]
    ) -> Iterator[tuple[bool, bool, list[str]]]:
        """Yield what to announce: whether stored, whether remote, and which pages.

        Args:
            event: The next event of an attachment.
            remote: Those of the pool's backends that are not of this host.
        """
        pages = self._tiers.setdefault(event.pool, {})
        gone: dict[bool, list[str]] = {False: [], True: []}
        there: dict[bool, list[str]] = {False: [], True: []}
        for one in event.hashes:
            tiers = pages.setdefault(one, set())
            before = tiers.issubset(remote) if tiers else None
            again = event.stored and event.backend in tiers
            (tiers.add if event.stored else tiers.discard)(event.backend)
            after = tiers.issubset(remote) if tiers else None
            if after is None:
                del pages[one]
            if before == after and not again:
                continue
            if before is not None:
                gone[before].append(one)
            if after is not None:
                there[after].append(one)
        while len(pages) > self.limit:
            oldest = next(iter(pages))
            gone[pages.pop(oldest).issubset(remote)].append(oldest)
        for stored, moved in ((False, gone), (True, there)):
            yield from ((stored, far, some) for far, some in moved.items() if some)


@attrs.frozen(kw_only=True)
class RowsSent:
    """Pages of one pool and request were sent to a peer.

    Args:
        rows: Rows before any were joined: one a token, layer and part.
        descriptors: Rows after that, which the backend got.
    """

    pool: str
    rows: int
    descriptors: int


@attrs.frozen(kw_only=True)
class SlotsExpected:
    """The slots that wait for senders changed, of one pool.

    Args:
        expected: Slots of requests under way.
        held: Slots of requests that ended, and whose senders may still write.
        landing_used: Bytes of it that are leased.
    """

    pool: str
    expected: int
    held: int
    landing_bytes: int
    landing_used: int


@attrs.frozen(kw_only=True)
class RequestArrived:
    """A request that a peer sends ended at its receiver.

    Args:
        outcome: "arrived", "failed", "aborted" or "corrupt"; "late" for a sender's
            completion after the request had ended.
        nbytes: Bytes that arrived in slots and may be used.
    """

    outcome: str
    nbytes: int


@attrs.frozen(kw_only=True)
class MessageRefused:
    """A message of a peer was refused before anything was done with it.

    Args:
        message: "offer", "ticket" or "completion".
        reason: "unreadable" or "unsigned"; of a ticket that may not be used:
            "used", "claim" (another process was to use it), "epoch" (its request is
            over) or "expired".
    """

    message: str
    reason: str


Event = (
    BatchEnded
    | BreakerMoved
    | CallsBehind
    | MemoryHeld
    | PoolRouted
    | PagesRestored
    | PagesHeld
    | StoreFilled
    | PluginLoaded
    | RowsSent
    | SlotsExpected
    | RequestArrived
    | MessageRefused
    | LoadDecided
    | LookupSkipped
    | GenerationOpened
    | HintAnswered
    | HostMemoryShared
    | PagesAnswered
    | PagesCopied
    | PoolsAttached
    | PoolsDetached
)
"""Everything that `kvdock_observe` may be given."""
