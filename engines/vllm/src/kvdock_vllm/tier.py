"""The tier behind vLLM's host memory.

It runs in the scheduler's process, which maps the host memory of all ranks of the
host. One row of that memory is one page of one KV cache group; a group is a pool.
vLLM decides which pages a prefix needs, and asks key by key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdock import Attachment, Outcome, TransferFuture, TransferManager
from kvdock.errors import KvdockError
from kvdock.events import AUDITED, PageHomes, requested_by, stored_for
from kvdock.hints import Hints, PagesOfPool, RequestHints, by_times
from kvdock.keys import adapter_hashes
from kvdock.observers.metrics import MetricDeltas
from kvdock.pays import limited_by
from kvdock_vllm.adapters import UNKNOWN
from kvdock_vllm.events import GROUP_BYTES, StoredKeys
from kvdock_vllm.pools import attach, check_canonical
from kvdock_vllm.restorable import check_rows, host_memory_words
from kvdock_vllm.stats import metric_definitions, take

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvdock.arrays import BoolArray, FloatArray, Int64Array
    from kvdock.pays import LoadCurve, LoadLimit
    from kvdock_vllm.identity import Identity
    from kvdock_vllm.pools import Handover

log = logging.getLogger("kvdock.vllm")

Opened = tuple[Attachment, Mapping[int, str]]
"""Storage, and each group's pool name by the group's number."""

_LOOK_S = 0.01
"""Seconds after which jobs are looked at although none is known to have ended."""

_WARN_S = 10.0
"""Seconds between two log lines of a drain that has to wait."""


@attrs.frozen(eq=False)
class _Part:
    """Those keys of a job, or of a lookup, that belong to one pool."""

    positions: list[int] = attrs.field(factory=list)
    hashes: list[str] = attrs.field(factory=list)


@attrs.define(eq=False)
class _Job:
    """One of vLLM's jobs, and its transfers."""

    number: int
    promotion: bool
    keys: list[OffloadKey]
    request: str = ""
    transfers: list[tuple[_Part, TransferFuture]] = attrs.field(factory=list)

    @property
    def done(self) -> bool:
        """Return whether no call can touch its rows any more."""
        return all(transfer.done for _, transfer in self.transfers)

    def ended(self, outcome: Outcome = Outcome.OK) -> BoolArray:
        """Return which keys ended so, bool (n,)."""
        found = np.zeros(len(self.keys), np.bool_)
        for part, transfer in self.transfers:
            found[part.positions] = transfer.outcomes == outcome
        return found


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's bookkeeping of lookups, whose thread asks the tier."""

    def __init__(self, tier: KvdockTier) -> None:
        self._tier = tier
        super().__init__(tier.tier_type)

    def batch_lookup(
        self, keys: list[OffloadKey], req_context: ReqContext
    ) -> list[bool]:
        """Return which pages are stored."""
        return self._tier.stored(keys, req_context)

    def mark_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Let requests find pages that they have missed: they are stored now."""
        for key in keys:
            state = self._lookup_state.get(key)
            if state is not None and state.result is False:
                state.result = True

    def forget(self) -> None:
        """Let no answer count that was asked for before."""
        self._lookup_state.clear()
        self._req_keys.clear()
        self._lookup_batch.clear()


class KvdockTier(SecondaryTierManager):  # type: ignore[misc]  # same
    """A secondary tier of vLLM's offloading that keeps pages in kvdock's backends.

    Every method is called on the scheduler's thread, except `stored`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - vLLM's TieringOffloadingSpec
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401 - vLLM's
        handover: Handover | None = None,
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector
        )
        if handover is None:
            raise KvdockError(
                "kvdock's tier has no identity of its pages: vLLM gives a tier none",
                fix='Use "kv_connector": "KvdockConnector", which brings its tier.',
            )
        check_canonical(offloading_spec.config)
        self._handover = handover
        self._spec = offloading_spec
        self._rows = primary_kv_view
        self._adapters = handover.adapters
        self._deltas = MetricDeltas()
        self._core = handover.settings.core
        self._jobs: list[_Job] = []
        self._look_s = 0.0
        self._limits: dict[str, LoadLimit] = {}
        self._cut: dict[str, set[OffloadKey]] = {}
        self._events: StoredKeys | None = None
        self._lookups = _Lookups(self)
        self._attachment: Attachment | None = None
        self._closed = False
        handover.tier = self

    @property
    def row_count(self) -> int:
        """Rows of host memory."""
        return self._rows.nbytes // int(self._spec.kv_bytes_per_chunk)

    def check_rows(self, scheduler: Any, step_tokens: int) -> None:  # noqa: ANN401 - vLLM's OffloadingConnectorScheduler
        """Reject host memory that cannot take what one step stores."""
        row_bytes = int(self._spec.kv_bytes_per_chunk)
        groups = scheduler.config.kv_group_configs
        check_rows(groups, self.row_count, row_bytes, step_tokens)
        log.info("%s", host_memory_words(groups, self.row_count))

    def open(self, identity: Identity) -> None:
        """Attach storage; called once, when the workers have reported.

        Raises:
            NoRoute: If no plugin takes a pool.
            KvdockError: As `attach` does.
        """
        self._identity = identity
        self.take(self._attach(identity))

    def next_generation(self, generation: str) -> Opened:
        """Close storage, and return it attached in another generation.

        Called on any thread, while vLLM has no job.

        Raises:
            KvdockError: As `attach` does, or if a call may still touch host memory;
                nothing is stored and found then.
        """
        self._close()
        return self._attach(attrs.evolve(self._identity, generation=generation))

    def _attach(self, identity: Identity) -> Opened:
        return attach(self._handover, identity, self._spec, self._rows, self._deltas)

    def take(self, opened: Opened) -> None:
        """Store and find pages in what was attached, from now on."""
        self._attachment, names = attachment, _ = opened
        self._closed = False
        self._homes = PageHomes(self._core.page_events)
        self._hints = Hints(self._core, attachment.notify)
        self._transfers = TransferManager(attachment)
        self._names = {
            number.to_bytes(GROUP_BYTES, "big"): name for number, name in names.items()
        }
        self._events = _events(self._handover, self._spec, names)
        self._tiers = {
            name: {one.backend: one for one in pool.placements}
            for name, pool in attachment.pools_by_name.items()
        }
        remote = any(
            one.remote for pool in self._tiers.values() for one in pool.values()
        )
        # A request that allows local tiers alone must not wait for a remote one.
        self.locality = Locality.REMOTE if remote else Locality.LOCAL
        if remote:
            self.cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    @property
    def attached(self) -> Attachment:
        """Storage, from the handshake of the workers on."""
        assert self._attachment is not None, "vLLM has sent no handshake of its workers"  # noqa: S101 - `EngineCore.__init__` does
        return self._attachment

    def _split(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> dict[str, _Part]:
        """Return pool name to the keys of that pool.

        Nothing for unknown adapters, and for what an audit has computed anew.
        """
        adapter = self._adapters.of(req_context.req_id)
        parts: dict[str, _Part] = {}
        if adapter == UNKNOWN or AUDITED in req_context.req_id:
            return parts
        for position, key in enumerate(keys):
            name = self._names[key[-GROUP_BYTES:]]
            part = parts.get(name)
            if part is None:
                part = parts[name] = _Part()
            part.positions.append(position)
            part.hashes.append(key[:-GROUP_BYTES].hex())
        if adapter:
            for part in parts.values():
                plain, part.hashes[:] = (
                    list(part.hashes),
                    adapter_hashes(part.hashes, adapter),
                )
                if self._events is not None:
                    self._events.note_adapter_hashes(part.hashes, plain)
        return parts

    def take_hints(
        self,
        req_context: ReqContext,
        keys: Sequence[OffloadKey],
        hashes_of: Callable[[Sequence[int]], list[bytes]],
    ) -> None:
        """Read the hints of a new request, and apply them to what is stored."""
        given = req_context.kv_hints
        if given is None:
            given = (req_context.kv_transfer_params or {}).get("kvdock")
        hints = self._hints.read(req_context.req_id, given)
        if not hints.hints:
            return
        req_context.set_state(hints)
        pools = self.attached.pools_by_name
        pages = [
            PagesOfPool(pools[name], part.hashes, self._ends(part, keys, req_context))
            for name, part in self._split(keys, req_context).items()
        ]
        adapter = self._adapters.of(req_context.req_id)

        def named(tokens: Sequence[int]) -> Sequence[str]:
            found = [one.hex() for one in hashes_of(tokens)]
            return [] if adapter == UNKNOWN else adapter_hashes(found, adapter)

        self._hints.apply(hints, pages, [*pools.values()], named)

    @staticmethod
    def _ends(
        part: _Part, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> Int64Array:
        """Return the token behind each page, int64 (n,); 0 where it is not known."""
        ends = [req_context.get_offload_key_position(keys[at]) for at in part.positions]
        return np.array([end or 0 for end in ends], np.int64)

    def stored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return which pages are stored; on the thread of the lookups.

        It ends at the deadline of a lookup, over all pools.
        """
        found = np.zeros(len(keys), np.bool_)
        deadline_s = self._core.deadlines.until("exists")
        with requested_by(req_context.req_id):
            for name, part in self._split(keys, req_context).items():
                there = self.attached[name].exists(part.hashes, deadline_s)
                found[part.positions] = there
        # Python's own bool: vLLM compares by identity.
        return [bool(one) for one in found]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a page is stored, or RETRY until the answer is there.

        For a request whose load of it was cut, it is not: for others it may be.
        """
        if self._cut and key in self._cut.get(req_context.req_id, ()):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def forget_lookups(self) -> None:
        """Look for every page again: the weights are other ones."""
        self._lookups.forget()
        self._cut.clear()

    def load_seconds(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        curves: dict[tuple[str, str], LoadCurve],
    ) -> FloatArray:
        """Return what loading the first keys of one group takes, float64 (n + 1,)."""
        seconds = np.zeros(len(keys) + 1)
        for name, part in self._split(keys, req_context).items():
            seconds += self.attached[name].load_seconds(part.hashes, curves)
        return seconds

    def limit(self, request: str, limit: LoadLimit | None) -> None:
        """End the loads of a request at a limit."""
        if limit is not None:
            self._limits[request] = limit

    def unlimit(self, request: str) -> None:
        """Forget the limit of a request, and what it cut."""
        self._limits.pop(request, None)
        self._cut.pop(request, None)
        if self._attachment is not None:
            self._attachment.pays.done(request)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows in the background."""
        self._adapters.check(job_metadata.req_context.req_id)
        self._submit(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fill rows in the background."""
        self._submit(job_metadata)

    def _submit(self, given: TransferJob) -> None:
        request = given.req_context.req_id
        job = _Job(given.job_id, given.is_promotion, list(given.keys), request)
        self._jobs.append(job)
        context = given.req_context
        hints = None if job.promotion else context.get_state(RequestHints)
        move = self._transfers.read if job.promotion else self._transfers.write
        pages: Int64Array = np.asarray(given.chunk_ids, np.int64)
        limit = self._limits.get(request) if job.promotion else None
        timeout_s = None
        if limit is not None:
            until_s = limit.until(self._core.deadlines.until("get"))
            timeout_s = max(0.0, until_s - time.monotonic())
        try:
            tenant = self._handover.tenants.get(request, 0)
            with requested_by(request), limited_by(limit), stored_for(tenant):
                for name, part in self._split(job.keys, context).items():
                    if hints is not None:
                        self._write(job, name, part, pages, hints, context)
                        continue
                    rows = pages[part.positions]
                    transfer = move(name, part.hashes, rows, timeout_s=timeout_s)
                    job.transfers.append((part, transfer))
        except KvdockError:
            # A defect of ours, or a closed attachment: what has no transfer fails.
            log.exception("a job of vLLM's was rejected")
        if not job.transfers:
            self._look_s = 0.0

    def _write(
        self,
        job: _Job,
        name: str,
        part: _Part,
        pages: Int64Array,
        hints: RequestHints,
        req_context: ReqContext,
    ) -> None:
        """Store pages with the times that the request's hints give them."""
        pool = self.attached[name]
        ends = self._ends(part, job.keys, req_context)
        told = partial(self._hints.stored, hints, pool)
        groups = by_times(hints.times(ends, pool.pool.page_tokens))
        for asked, which in groups.items():
            some = _Part(
                [part.positions[at] for at in which], [part.hashes[at] for at in which]
            )
            times = (asked, told) if asked else None
            own = pages[some.positions]
            transfer = self._transfers.write(name, some.hashes, own, times=times)
            job.transfers.append((some, transfer))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        if not self._jobs:
            return ()
        now_s = time.monotonic()
        # Most calls find nothing, and looking at 32 jobs takes 30 us each time.
        if now_s < self._look_s and not self._transfers.any_ended.is_set():
            return ()
        self._transfers.any_ended.clear()
        self._look_s = now_s + _LOOK_S
        ended = [job for job in self._jobs if job.done]
        if ended:
            self._jobs = [job for job in self._jobs if job not in ended]
        return [self._result(job) for job in ended]

    def _result(self, job: _Job) -> JobResult:
        moved = job.ended()
        whole = bool(moved.all())
        good = job.keys
        if not whole:
            good = [key for key, ok in zip(job.keys, moved.tolist(), strict=True) if ok]
        if not job.promotion:
            self._lookups.mark_stored(good)
        elif not whole:
            # Until vLLM stores it again, a key that failed must not be a hit:
            # vLLM would try it without end.
            lost = set(job.keys).difference(good)
            if job.request in self._limits:
                late = np.flatnonzero(job.ended(Outcome.TIMEOUT)).tolist()
                cut = self._cut.setdefault(job.request, set())
                cut.update(job.keys[at] for at in late)
                lost -= cut
            self._lookups.mark_miss(lost)
        return JobResult(
            job_id=job.number,
            success=whole,
            successful_keys=None if whole else good or None,
            transfer_time=max((one.seconds for _, one in job.transfers), default=0.0),
            transfer_bytes=int(moved.sum()) * self.block_size_bytes,
        )

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Keep pages young that vLLM serves from its own memory."""
        for name, part in self._split(list(keys), req_context).items():
            self.attached[name].touch(part.hashes)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield which pages storage has, or has no longer, since the last call."""
        if self._events is None or self._closed:
            return
        for event in self.attached.take_page_events():
            tiers = self._tiers[event.pool]
            reported = all(one.reports_removal for one in tiers.values())
            remote_tiers = {name for name, one in tiers.items() if one.remote}
            moved = self._homes.moved(event, remote_tiers)
            for stored, remote, hashes in moved:
                # Without `ownership`: Dynamo drops events of owners it does not know.
                yield OffloadingEvent(
                    keys=self._events.keys(event.pool, hashes),
                    medium=self.medium,
                    removed=not stored,
                    locality=Locality.REMOTE if remote else Locality.LOCAL,
                    # vLLM keeps what it knows of a page until its removal is reported.
                    removal_expected=stored and reported,
                )

    def has_pending_work(self) -> bool:
        """Return whether vLLM has to go on asking for ended jobs."""
        return bool(self._jobs)

    def on_new_request(
        self,
        req_context: ReqContext,  # noqa: ARG002 - vLLM's interface
    ) -> RequestOffloadingContext:
        """Ask for new pages alone: a page that was hit is stored already."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request."""
        self._lookups.cleanup(req_context.req_id)
        self.unlimit(req_context.req_id)
        self._adapters.end(req_context.req_id)
        self._handover.tenants.pop(req_context.req_id, None)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002 - same
        """Send the lookups of this step to their thread."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until no call can touch a row.

        Staged transfers end at their deadline. One that moves rows directly may
        hang, and so does this then, as vLLM demands: a row that is given to another
        page would be mixed with it.
        """
        for job in self._jobs:
            for _, transfer in job.transfers:
                while not transfer.wait(_WARN_S):
                    log.warning(
                        "waiting for storage to release rows of pool %s", transfer.pool
                    )

    def shutdown(self) -> None:
        """Finish the stores that end in time, and release storage.

        Raises:
            KvdockError: If a call may still touch the host memory; vLLM then keeps
                it.
        """
        self._lookups.shutdown()
        self._close()

    def _close(self) -> None:
        if self._attachment is None or self._closed:
            return
        self._closed = True
        self._hints.close()
        tables = [pool.leases for pool in self._attachment.pools_by_name.values()]
        self._transfers.close()
        held = sum(table.leased_pages for table in tables)
        if held:
            raise KvdockError(f"storage still has {held} rows of host memory")

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 - same
    ) -> dict[str, Any]:
        """Declare the metrics of `get_stats`; in the process that serves them."""
        return metric_definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        return take(self._deltas)


def _events(
    handover: Handover,
    spec: Any,  # noqa: ANN401 - vLLM's TieringOffloadingSpec
    names: Mapping[int, str],
) -> StoredKeys | None:
    """Return what turns page events into vLLM's, where both sides want them."""
    if not handover.settings.own.enable_kv_events:
        return None
    if not spec.kv_events_config.enable_kv_cache_events:
        log.warning(
            "enable_kv_events is set, and vLLM publishes no KV events: "
            "pass it --kv-events-config"
        )
        return None
    return StoredKeys(names, handover.settings.core.page_events)
