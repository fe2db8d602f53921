"""The class that SGLang loads as its `dynamic` storage backend.

This is the contract and nothing else: what the engine passes in is turned into
page hashes and page indices, what comes out of the core into the engine's
lists of booleans. Up to four engine threads call it at a time. While it stores
and loads, nothing is raised: what went wrong is a miss whose cause is logged.

Source: SGLang 0.5.23, `mem_cache/hicache_storage.py`: `HiCacheStorage`.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from kvdock import Dock, HitPolicy, Outcome
from kvdock.errors import KvdockError
from kvdock.events import (
    GenerationOpened,
    HostMemoryShared,
    LookupSkipped,
    current_request,
    stored_for,
)
from kvdock.former_generations import FormerGenerations
from kvdock.generations import Generation, run_of
from kvdock.hints import Hints, RequestHints, by_times
from kvdock.pays import LIMIT
from kvdock.resilience import run_within
from kvdock_sglang import engine_api, pays, weight_updates
from kvdock_sglang.attachments import AttachedHostPool, Attachments
from kvdock_sglang.hints import RequestPages
from kvdock_sglang.hit_query import PoolQuery, evaluate_query
from kvdock_sglang.host_pools import EngineContext, HostPool, describe, heads_of
from kvdock_sglang.layout_check import check
from kvdock_sglang.lora_identity import callers_key
from kvdock_sglang.namespace import Ranks, launched, namespace, target_kv_heads
from kvdock_sglang.operation import StorageOperation, current, weights
from kvdock_sglang.pool_names import EnginePool, is_draft
from kvdock_sglang.router_events import EVENT_PAGES, RouterEvents, published
from kvdock_sglang.settings import collect
from kvdock_sglang.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvdock.events import Event


log = logging.getLogger("kvdock.sglang")

T = TypeVar("T")

_DAMAGE = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
_BATCH_PAGES = 128
"""Pages of one batch of the engine.

Source: SGLang 0.5.23, `managers/cache_controller.py:STORAGE_BATCH_SIZE`.
"""


class KvdockStorage(HiCacheStorage):  # type: ignore[misc] # SGLang is not typed
    """SGLang's storage tier, kept by the kvdock plugin that `plugin` names."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any) -> None:  # noqa: ANN401 - always an empty dict today
        """Read the configuration and load the plugins.

        Called on the engine's scheduler thread. The engine decides after this
        call whether pages travel by address, so this call sets that they do.

        Raises:
            KvdockError: If this SGLang lacks a name that storage uses, the
                configuration is wrong or the plugin is not usable; the engine
                then does not start.
        """
        del kwargs
        engine_api.check()
        if storage_config.extra_config is None:
            storage_config.extra_config = {}
        storage_config.extra_config["interface_v1"] = 1
        self.given = collect(storage_config.extra_config, lenient=True)
        if published() and not self.given.core.page_events:
            core = attrs.evolve(self.given.core, page_events=EVENT_PAGES)
            self.given = attrs.evolve(self.given, core=core)
        pages = self.given.core.page_events
        self.events = RouterEvents(pages) if pages else None
        self.run = run_of(self.given.own.generations)
        self.config = storage_config
        self.ranks = Ranks.of(storage_config)
        self.ledger = Stats(
            metrics=bool(storage_config.enable_storage_metrics),
            watches="metrics" not in self.given.core.observers,
        )
        dock = Dock.for_engine(self.given.used, self.given)
        self._attachments = Attachments(dock, self.given, self.ranks)
        self._hinted = RequestPages(Hints(self.given.core, self._notify))
        self._former = FormerGenerations(
            self.run, self.given.own.kept_generations, dock, self.given
        )
        self._weights = -1
        self._waiting: dict[str, object] = {}
        self._attached = False
        self._stopping = False

    # --- Registration: the engine's scheduler thread; an error rejects -------

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        """Take the anchor's host pool."""
        self.mem_pool_host = mem_pool_host
        self._waiting[EnginePool.KV.value] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Take any host pool; the anchor comes a second time this way.

        Raises:
            KvdockError: If a pool comes late and cannot be stored.
        """
        name = _word(host_pool_name)
        if not self._attached:
            self._waiting[name] = host_pool
            return
        if self._attachments.attached_pool(name) is None:
            self._attachments.add(self._describe(name, host_pool))

    def on_host_pools_registered(self) -> None:
        """Plan and attach everything that was registered so far.

        Draft pools come late when the engine starts, and in this burst when
        storage is attached to a running one. They are the same pages, so they
        are attached in one way: each by itself, after the burst.

        Raises:
            KvdockError: If a pool is of an unknown class, no plugin takes it
                (the message is the route table), or a plugin rejects its memory.
        """
        weight_updates.check_steps(self.run, self.ranks.pp_size)
        self._weights = weight_updates.begin(self.given.own.revision)
        burst = {n: pool for n, pool in self._waiting.items() if not is_draft(n)}
        pools = [self._describe(name, pool) for name, pool in burst.items()]
        target, drafts = namespace(
            self.config.model_name,
            self.ranks,
            self.given.own,
            launched(self.given.own),
            pools,
        )
        self._attachments.attach(pools, target, drafts)
        anchor = self._attachments.attached_pool(EnginePool.KV.value)
        if self.events is not None and anchor is not None and anchor.attachment:
            self.events.place(anchor.attachment[anchor.spec.name].reach)
        self._attached = True
        waiting, self._waiting = self._waiting, {}
        for name, pool in waiting.items():
            if name not in burst:
                self.register_mem_host_pool_v2(pool, name)

    def open_generation(
        self, name: Callable[[], Generation], deadline_s: float
    ) -> None:
        """Store and find pages of other weights from now on.

        Called on the scheduler thread while nothing is under way. `name` says what they
        are called; it may read files.

        Raises:
            KvdockError: If it takes too long, or what an attachment raises; nothing is
                stored and found then.
        """
        left = self._attachments

        def attach() -> tuple[Generation, Attachments]:
            generation = name()
            if self.ranks.first_on_host:
                self._former.leave(left.attachments)
            return generation, left.next_generation(generation.text)

        generation, opened = run_within(
            deadline_s, attach, "opening a generation", lambda late: late[1].close()
        )
        weight_updates.WEIGHTS.settle()
        self._attachments = opened
        self._weights = weight_updates.WEIGHTS.count
        kind = "run" if generation.run else "private"
        opened.notify(GenerationOpened(kind=kind))
        log.info("storage goes on with generation %s", generation)
        if self.ranks.first_on_host:
            self._former.delete(opened.attachments)

    def _notify(self, event: Event) -> None:
        self._attachments.notify(event)

    def _describe(self, name: str, pool: object) -> HostPool:
        anchor: Any = self.mem_pool_host
        group, held = 0, heads_of(pool)
        if self.config.should_split_heads and self.config.tp_lcm_size:
            ranks = int(self.config.tp_lcm_size) // self.ranks.shard.tp_size
            group = max(1, held // ranks)
        # Only a rank with a single head may have it in common with others.
        shared = held == 1 and self.ranks.shard.tp_size > 1
        place = EngineContext(
            shard=self.ranks.shard,
            page_tokens=int(anchor.page_size) * self.ranks.shard.dcp_size,
            head_group=group,
            kv_heads=target_kv_heads() if shared else 0,
        )
        described = describe(name, pool, place)
        check(described, pool)
        return described

    def close(self) -> None:
        """Close all attachments; safe to call at any time and twice."""
        self._hinted.hints.close()
        try:
            self._attachments.close()
        except Exception as error:  # noqa: BLE001 - the engine does not expect any
            self.ledger.record_error("close", error)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Answer every call with a miss at once while the engine stops its threads.

        Called on the scheduler thread. Calls that are already under way end by
        their deadline.
        """
        self._stopping = True
        try:
            yield
        finally:
            self._stopping = False

    def writes(self, pool_name: str) -> bool:
        """Return whether this rank has objects of a pool to store.

        The patch of the engine's writer rule calls this.
        """
        attached_pool = self._attachments.attached_pool(_word(pool_name))
        return attached_pool is not None and attached_pool.spec.writes(self.ranks.shard)

    @property
    def operation(self) -> StorageOperation | None:
        """What the storage call of this thread belongs to; None if it is not known.

        For hints, tenants and decisions, inside of a call of the engine.
        """
        return current()

    # --- Lookup: the prefetch thread -----------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether one page of the anchor is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the stored pages of the anchor's prefix."""
        return int(self.batch_exists_v2(keys, None, extra_info).kv_hit_pages)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find every prefix of these pages that could be restored."""
        del extra_info
        result = self._safely(
            "exists", lambda: self._exists(keys, pool_transfers or []), None
        )
        return result or PoolTransferResult(0, {}, [])

    def _exists(
        self, keys: Sequence[str], transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        deadline_s = self._deadline("exists")
        if self._weights != weight_updates.WEIGHTS.count:
            self.note_skipped(current_request(), "weights")
        anchor = self._attached_pool(EnginePool.KV)
        asked = [PoolQuery(anchor.spec, anchor.lookup(keys, deadline_s))]
        for transfer in transfers:
            attached_pool = self._attached_pool(transfer.name)
            there = attached_pool.lookup(keys, deadline_s)
            asked.append(
                PoolQuery.of(
                    attached_pool.spec,
                    there,
                    policy=_word(transfer.hit_policy),
                    window=len(transfer.keys or []),
                    # A release without these fields has no groups of blocks.
                    block_pages=int(getattr(transfer, "block_pages", 0)),
                    group_pages=int(getattr(transfer, "group_pages", 0)),
                )
            )
        for one in asked:
            self.ledger.watch(one.spec.name, "exists", int(one.there.sum()))
        hits = evaluate_query(asked, len(keys))
        return PoolTransferResult(
            hits.best,
            {name: pages for name, pages in hits.found.items() if pages},
            list(hits.prefixes),
        )

    # --- Pages by address: prefetch and backup threads -----------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ANN401 - a tensor of slots
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages of the anchor; one answer per page."""
        del extra_info
        until_s = self._until_s(keys)
        moved = self._move("get", EnginePool.KV, keys, host_indices, until_s)
        self._attachments.notify_loaded({EnginePool.KV: moved})
        return moved

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,  # noqa: ANN401 - a tensor of slots
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the anchor; one answer per page."""
        del extra_info
        until_s = self._deadline("put")
        return self._move("set", EnginePool.KV, keys, host_indices, until_s)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Load pages of other pools; one answer per page and pool."""
        del extra_info
        done = self._move_all("get", transfers, self._until_s([]))
        windows = {
            _word(one.name)
            for one in transfers
            if _word(one.hit_policy) == HitPolicy.TRAILING_PAGES
        }
        loaded = {_word(name): good for name, good in done.items()}
        self._attachments.notify_loaded(loaded, windows)
        return done

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of other pools; one answer per page and pool."""
        del extra_info
        return self._move_all("set", transfers, self._deadline("put"))

    def _move_all(
        self, what: str, transfers: Sequence[PoolTransfer], deadline_s: float
    ) -> dict[str, list[bool]]:
        done: dict[str, list[bool]] = {}
        for one in transfers:
            # One pool may come in several pieces; the engine reads one list.
            keys, slots = one.keys or [], one.host_indices
            moved = self._move(what, one.name, keys, slots, deadline_s)
            done[one.name] = [*done.get(one.name, []), *moved]
        return done

    def _move(
        self,
        what: str,
        name: str,
        keys: Sequence[str],
        slots: Any,  # noqa: ANN401 - a tensor of slots
        deadline_s: float,
    ) -> list[bool]:
        missed = [False] * len(keys)
        if not keys:
            return missed
        return self._safely(
            f"{what} of {_word(name)}",
            lambda: self._moved(
                what, self._attached_pool(name), keys, slots, deadline_s
            ),
            missed,
        )

    def _moved(
        self,
        what: str,
        attached_pool: AttachedHostPool,
        keys: Sequence[str],
        slots: Any,  # noqa: ANN401 - a tensor of slots
        deadline_s: float,
    ) -> list[bool]:
        pages = page_indices(slots, attached_pool.pool.page_slots, len(keys))
        began = time.perf_counter()
        move = attached_pool.read if what == "get" else self._writer(attached_pool)
        with stored_for(self._tenant()):
            outcomes = move(keys, pages, deadline_s)
        seconds = time.perf_counter() - began
        if what == "get" and np.isin(outcomes, _DAMAGE).any():
            self._verify_rest(attached_pool, keys, slots, deadline_s)
        good: list[bool] = (outcomes == Outcome.OK).tolist()
        self.ledger.watch(attached_pool.spec.name, what, sum(good))
        if attached_pool.pool.name == EnginePool.KV:
            nbytes = sum(good) * attached_pool.spec.page_bytes(self.ranks.shard)
            self.ledger.record(what, sum(good), nbytes, seconds)
        return good

    def _tenant(self) -> int:
        """Return the number of the tenant that this thread's call belongs to."""
        tenants, operation = self.given.core.tenants, current()
        if not tenants or operation is None:
            return 0
        number = tenants.number_of_salt(operation.salt)
        return number or tenants.number_of_salt(callers_key(operation.extra_key))

    def _writer(
        self, attached_pool: AttachedHostPool
    ) -> Callable[[Sequence[str], Any, float], Any]:
        """Return what stores pages of a pool, those of hints with their times."""
        attachment = attached_pool.attachment

        def write(keys: Sequence[str], pages: Any, deadline_s: float) -> Any:  # noqa: ANN401 - int64 (n,) to uint8 (n,)
            groups = by_times(self._hinted.times(keys))
            if attachment is None or not any(groups):
                return attached_pool.write(keys, pages, deadline_s)
            pool = attachment[attached_pool.spec.name]
            told = partial(self._hinted.hints.stored, RequestHints(), pool)
            outcomes = np.empty(len(keys), np.uint8)
            for asked, which in groups.items():
                some = [keys[at] for at in which]
                # It checks nothing, so nothing may be out of bounds.
                own = pool.checked_pages(some, pages[which])
                outcomes[which] = pool.store(some, own, deadline_s, asked, told)
            return outcomes

        return write

    def _verify_rest(
        self,
        attached_pool: AttachedHostPool,
        keys: Sequence[str],
        slots: Any,  # noqa: ANN401 - a tensor of slots
        deadline_s: float,
    ) -> None:
        """Drop at once what is damaged of the rest of a prefix.

        The engine stops at the first batch that fails, so a prefix that is damaged
        all along would heal by one batch for each request. Reading it drops what is
        wrong. The pages go to the slots that the operation holds, and nothing uses
        them: the engine counts what came before. A pool with slots of its own, as
        for states, is read in one call, and has no rest.
        """
        operation, wide = current(), attached_pool.pool.page_slots
        if operation is None or operation.slots is None:
            return
        hashes = list(operation.hashes)
        at = hashes.index(keys[0]) if keys[0] in hashes else len(hashes)
        end = at + len(keys)
        if not np.array_equal(slots, operation.slots[at * wide : end * wide]):
            return
        for at in range(end, len(hashes), _BATCH_PAGES):
            some = hashes[at : at + _BATCH_PAGES]
            held = operation.slots[at * wide : (at + len(some)) * wide]
            if len(held) < len(some) * wide or time.monotonic() >= deadline_s:
                return
            attached_pool.read(some, page_indices(held, wide, len(some)), deadline_s)

    # --- Flat pages: not supported -------------------------------------------
    # SGLang calls these for backends without page addresses, which this one has.

    def get(
        self,
        key: str,
        target_location: Any = None,  # noqa: ANN401 - a tensor
        target_sizes: Any = None,  # noqa: ANN401 - not used by any caller
    ) -> Any:  # noqa: ANN401 - a tensor, by the contract
        """Report a miss: flat pages are not supported."""
        return self.batch_get([key], target_location, target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,  # noqa: ANN401 - tensors
        target_sizes: Any = None,  # noqa: ANN401 - not used by any caller
    ) -> list[None]:
        """Report a miss for each key: flat pages are not supported."""
        del target_locations, target_sizes
        self.ledger.record_error("get of flat pages", _flat_pages())
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any = None,  # noqa: ANN401 - a tensor
        target_location: Any = None,  # noqa: ANN401 - not used by any caller
        target_sizes: Any = None,  # noqa: ANN401 - not used by any caller
    ) -> bool:
        """Store nothing: flat pages are not supported."""
        return self.batch_set([key], value, target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,  # noqa: ANN401 - tensors
        target_locations: Any = None,  # noqa: ANN401 - not used by any caller
        target_sizes: Any = None,  # noqa: ANN401 - not used by any caller
    ) -> bool:
        """Store nothing: flat pages are not supported."""
        del keys, values, target_locations, target_sizes
        self.ledger.record_error("set of flat pages", _flat_pages())
        return False

    # --- Control: the scheduler thread ---------------------------------------

    def clear(self) -> bool:
        """Delete what this model and format stored, and nothing else.

        Raises:
            KvdockError: If a plugin failed. SGLang takes every answer for a
                success; only an error reaches its log.
        """
        self._attachments.clear()
        return True

    def get_stats(self) -> Any:  # noqa: ANN401 - the engine's StorageMetrics
        """Return what was moved since the last call, as the engine counts."""
        return self._safely("stats", self.ledger.drain, None)

    def note_events(self, tree: Any, node_id: Any) -> None:  # noqa: ANN401 - SGLang's
        """Note what routers are to be told once a node is stored."""
        if self.events is not None:
            events = self.events
            self._safely("events", lambda: events.note(tree, node_id), None)

    def take_events(self, tree: Any, taken: list[Any]) -> list[Any]:  # noqa: ANN401 - same
        """Return SGLang's events and those of storage."""
        events = self.events
        if events is None or not tree.kv_events.enabled:
            return taken
        report = self._attachments.take_page_events
        return self._safely("events", lambda: list(events.take(taken, report())), taken)

    def note_skipped(self, request: str, reason: str) -> None:
        """Tell observers that SGLang asked nothing for a request, and why."""
        event = LookupSkipped(request=request, reason=reason)
        self._safely("skipped", lambda: self._attachments.notify(event), None)

    def note_cut(self, operation: Any, rows: int, pages: int, computed: int) -> None:  # noqa: ANN401 - SGLang's
        """Tell observers that host memory takes less of a prefix than was found.

        Args:
            operation: SGLang's prefetch.
            rows: Pages that host memory has.
            pages: Pages of the prefix.
            computed: Tokens of them that are not loaded.
        """
        event = HostMemoryShared(
            request=pays.request_of(operation),
            rows=rows,
            pages=pages,
            waited_s=0.0,
            computed_tokens=computed,
        )
        self._safely("cut", lambda: self._attachments.notify(event), None)

    def take_hints(self, cache: Any, req: Any) -> None:  # noqa: ANN401 - SGLang's
        """Follow the hints of a request that has arrived."""
        begin, every = self._hinted.begin, self._attachments.pools
        pools = [
            one.attachment[one.spec.name] for one in every.values() if one.attachment
        ]
        self._safely("hints", lambda: begin(cache, req, pools), None)

    def note_insert(self, cache: Any, req: Any, up_to: int) -> None:  # noqa: ANN401 - same
        """Note pages of a request that SGLang is about to store."""
        insert = self._hinted.inserted
        self._safely("hints", lambda: insert(cache, req, up_to), None)

    def decide(self, operation: Any, hashes: list[str], page_tokens: int) -> int:  # noqa: ANN401 - SGLang's
        """Return how many of the pages that were found for a prefetch are loaded."""
        policy, found = self._attachments.pays, len(hashes)
        if policy is None or not found:
            return found
        given = (self._attachments, policy, operation, hashes, page_tokens)
        return self._safely("decide", lambda: pays.decide(*given), found)

    def end_load(self, operation: Any) -> None:  # noqa: ANN401 - SGLang's
        """Note that nothing more is loaded for a prefetch."""
        policy = self._attachments.pays
        if policy is not None:
            policy.done(pays.request_of(operation))

    def learn_step(self, batch: Any) -> None:  # noqa: ANN401 - SGLang's ScheduleBatch
        """Learn what computing takes from a step that has ended."""
        policy = self._attachments.pays
        if policy is not None:
            self._safely("learn", lambda: pays.learn_step(policy, batch), None)

    # --- Inside --------------------------------------------------------------

    def _until_s(self, keys: Sequence[str]) -> float:
        """Return until when a load may take; 0 where it does not pay any more."""
        until_s, limit, operation = self._deadline("get"), LIMIT.get(), current()
        if limit is None:
            return until_s
        hashes = list(operation.hashes) if operation is not None else []
        at = hashes.index(keys[0]) if keys and keys[0] in hashes else 0
        if at and limit.reached(at / len(hashes)):
            return 0.0
        return limit.until(until_s)

    def _deadline(self, what: str) -> float:
        """Return when one call of the engine must end, over all of its pools."""
        return self.given.core.deadlines.until(what)

    def _attached_pool(self, name: str) -> AttachedHostPool:
        began = weights()
        weight_updates.check(self._weights if began in (None, self._weights) else -1)
        attached_pool = self._attachments.attached_pool(_word(name))
        if attached_pool is None:
            raise KvdockError(f"pool {_word(name)!r} is not attached")
        return attached_pool

    def _safely(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Run a call of the engine; an error is a miss."""
        if self._stopping:
            return otherwise
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - nothing may reach the engine's threads
            self.ledger.record_error(what, error)
            return otherwise


def page_indices(slots: Any, page_slots: int, pages: int) -> Any:  # noqa: ANN401 - a tensor of slots in, int64 (pages,) out
    """Turn the engine's host slots into page indices, int64 (pages,).

    Raises:
        KvdockError: If they are not whole pages, each in one piece.
    """
    if slots is None:
        raise KvdockError("no host slots are given")
    rows = np.asarray(slots, np.int64)
    if rows.shape != (pages * page_slots,):
        raise KvdockError(
            f"{pages} pages of {page_slots} slots come with {rows.size} host slots"
        )
    rows = rows.reshape(pages, page_slots)
    first = rows[:, 0]
    in_order = rows == first[:, np.newaxis] + np.arange(page_slots)
    whole = (first % page_slots == 0) & in_order.all(axis=1)
    if not whole.all():
        raise KvdockError(
            f"host slots {rows[np.argmin(whole)].tolist()[:4]}... are not a page"
        )
    return first // page_slots


def _flat_pages() -> KvdockError:
    """Return why the older calls of the engine's contract move nothing."""
    return KvdockError(
        "kvdock moves pages by address, and copies of flat pages are not supported",
        fix='Leave "interface_v1" out of the configuration; kvdock sets it to 1.',
    )


def _word(name: object) -> str:
    """Return the plain text of one of the engine's text enums."""
    return str(getattr(name, "value", name))
