# ruff: noqa: ANN401 - LMCache's own objects
"""The adapter that LMCache loads: its second level on the backends of kvdock.

LMCache submits tasks and is told by a file descriptor when one has ended. Each kind of
task has threads of its own here, so that a slow store delays no load; what a task asks
of storage ends at the deadlines of the core.

Source: LMCache 0.5.6 and 0.5.7rc2, `v1/distributed/l2_adapters/base.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvdock import (
    Attachment,
    Dock,
    Outcome,
    Plan,
    RouteRequirements,
    Scope,
    Shard,
)
from kvdock.errors import KvdockError
from kvdock.throttled_log import ThrottledLog
from kvdock_lmcache.objects import POOL, Arena, Form, page_hash
from kvdock_lmcache.settings import Configuration, collect

if TYPE_CHECKING:
    from kvdock import AttachedPool
    from kvdock.arrays import Int64Array

log = logging.getLogger("kvdock.lmcache")

MOST_FORMS = 64
"""Pools of one adapter: payloads of any length would make one for each of them."""
_RETRY_S = 30.0
"""Seconds until a pool that could not be attached is tried again."""
_MOST_DELETED = 1 << 16
"""Deleted objects of a model that are remembered for forms that are met later."""
_OK = int(Outcome.OK)


class KvdockL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache is not installed where types are checked
    """Settings, as LMCache hands them over."""

    def __init__(self, given: Configuration) -> None:
        self.given = given

    @classmethod
    def from_dict(cls, d: Mapping[str, object]) -> KvdockL2AdapterConfig:
        """Read LMCache's mapping."""
        return cls(collect(d))

    @classmethod
    def help(cls) -> str:
        """Return what LMCache prints about wrong settings."""
        return (
            "kvdock: plugin (a backend of `kvdock list`) or tiers; revision (which "
            "weights); lora, page_format, salt; core (deadlines, ...); and the "
            "backend's own settings."
        )


@attrs.frozen(eq=False)
class _Kind:
    """One kind of task: its threads, its signal and the results not yet taken."""

    threads: ThreadPoolExecutor
    signal: Any = attrs.field(factory=create_event_notifier)
    results: dict[int, Any] = attrs.field(factory=dict)


class KvdockL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # same
    """LMCache's second level on the backends that the settings name.

    Args:
        l1_memory_desc: The memory of the first level, which objects lie in.

    Raises:
        KvdockError: If a setting is wrong, no backend takes the objects, or there is
            no memory on the host.
    """

    def __init__(
        self, config: KvdockL2AdapterConfig, l1_memory_desc: object = None
    ) -> None:
        self._given = config.given
        self._arena = Arena.of(l1_memory_desc)
        self._dock = Dock.for_engine(self._given.used, self._given)
        # With a capacity, LMCache deletes what it knows when its watermark is reached.
        super().__init__(max_capacity_bytes=self._quota())
        # What no backend takes is refused when LMCache starts.
        self._plan(Form("", (), (), 4096))
        transfers = self._given.core.transfers
        self._store, self._load, self._lookup = (
            _Kind(ThreadPoolExecutor(threads, f"kvdock-{name}"))
            for name, threads in (
                ("store", transfers.writers),
                ("load", transfers.readers),
                ("lookup", 1),
            )
        )
        self._numbers = count()
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        self._attached: dict[Form, Attachment] = {}
        self._retry_at: dict[Form, float] = {}
        # By model; a later form is one that an earlier process has stored.
        self._deleted: dict[str, dict[str, None]] = {}
        # Lookups say less than loads: the form that objects of a group had last.
        self._last: dict[tuple[str, int], Form] = {}
        self._log = ThrottledLog()

    def get_store_event_fd(self) -> int:
        """Return what is readable when a store has ended."""
        return int(self._store.signal.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return what is readable when a lookup has ended."""
        return int(self._lookup.signal.fileno())

    def get_load_event_fd(self) -> int:
        """Return what is readable when a load has ended."""
        return int(self._load.signal.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects in the background; return the task's number."""
        failed = L2StoreResult(False, 0)
        return self._submit(self._store, partial(self._put, keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that have ended, once each."""
        with self._lock:
            ended = dict(self._store.results)
            self._store.results.clear()
        return ended

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        """Look objects up in the background; return the task's number.

        Nothing is locked: what is evicted before it is loaded is a miss.
        """
        nothing = Bitmap(len(keys))
        find = partial(self._find, keys, group_layout_descs)
        return self._submit(self._lookup, find, nothing)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return which objects are there, once; None before the lookup has ended."""
        with self._lock:
            return self._lookup.results.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects in the background; return the task's number."""
        nothing = Bitmap(len(keys))
        return self._submit(self._load, partial(self._get, keys, objects), nothing)

    def query_load_result(self, task_id: int) -> Any:
        """Return which objects are loaded, once; None before the load has ended."""
        with self._lock:
            return self._load.results.pop(task_id, None)

    def get_memory_tags(self) -> Any:
        """Return whether other hosts share what is stored."""
        reach = max(
            self._dock.backends[name].manifest.sharing for name in self._given.used
        )
        near = api.MemoryResidency.LOCAL
        where = near if reach <= Scope.HOST else api.MemoryResidency.REMOTE
        return api.MemoryTags(api.MemorySegment.STORAGE, where)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, whatever their form.

        Of a form that this process has not met yet, say in a process that was just
        started, they are deleted when it is met, before anything of it is found.
        """
        with self._attaching:
            for key in keys:
                deleted = self._deleted.setdefault(key.model_name, {})
                deleted[page_hash(key)] = None
                if len(deleted) > _MOST_DELETED:
                    del deleted[next(iter(deleted))]
            attached = list(self._attached.items())
        for form, cache in attached:
            mine = [key for key in keys if key.model_name == form.model]
            hashes = [page_hash(key) for key in mine]
            there = cache[POOL].exists(hashes)
            self._forget(form, cache, hashes)
            gone = np.flatnonzero(there & ~cache[POOL].exists(hashes))
            told = [mine[at] for at in gone]
            if told:
                self._notify_keys_deleted(told, [form.nbytes] * len(told))

    def _forget(self, form: Form, cache: Attachment, hashes: list[str]) -> None:
        failed = np.count_nonzero(cache.delete(hashes))
        if failed:
            what = f"{failed} of {len(hashes)} objects of {form} are not deleted"
            self._log.warning("delete", what)

    def _quota(self) -> int:
        """Return the bytes that the largest tier may keep; 0 where no setting says."""
        settings = [
            self._dock.backends[name].settings(self._given.backends.get(name))
            for name in self._given.used
        ]
        return max(getattr(each, "quota", 0) for each in settings)

    def report_status(self) -> dict[str, object]:
        """Return the state of the backends, as their circuit breakers see it."""
        open_ = [
            f"{name} {operation}"
            for cache in list(self._attached.values())
            for name, operations in cache.breakers().items()
            for operation, state in operations.items()
            if state != "closed"
        ]
        return {
            "is_healthy": not open_,
            "type": type(self).__name__,
            "backends": list(self._given.used),
            "open_breakers": open_,
        }

    def close(self) -> None:
        """Wait for the tasks that run, drop the others, and release storage."""
        kinds = (self._store, self._load, self._lookup)
        for kind in kinds:
            kind.threads.shutdown(cancel_futures=True)
        for cache in self._attached.values():
            cache.close()
        for kind in kinds:
            kind.signal.close()

    def _submit(self, kind: _Kind, work: Callable[[], object], failed: object) -> int:
        number = next(self._numbers)

        def run() -> None:
            result = failed
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - LMCache waits for each task
                self._log.warning("task", f"a task of LMCache's failed: {error}", error)
            with self._lock:
                kind.results[number] = result
            kind.signal.notify()

        kind.threads.submit(run)
        return number

    def _put(self, keys: list[Any], objects: list[Any]) -> Any:
        """Store what is not there, and tell LMCache's listeners of that alone."""
        stored, moved = 0, 0
        for form, pool, at, hashes in self._grouped(keys, self._forms(keys, objects)):
            new = np.flatnonzero(~pool.exists(hashes))
            pages = [self._arena.page(objects[one]) for one in at[new]]
            outcomes = pool.put([hashes[one] for one in new], pages)
            good = [keys[one] for one in at[new[outcomes == _OK]]]
            stored += len(at) - len(new) + len(good)
            moved += len(good) * form.nbytes
            if good:
                self._notify_keys_stored(good, [form.nbytes] * len(good))
        return L2StoreResult(stored == len(keys), moved)

    def _get(self, keys: list[Any], objects: list[Any]) -> Any:
        found = Bitmap(len(keys))
        for _, pool, at, hashes in self._grouped(keys, self._forms(keys, objects)):
            pages = [self._arena.page(objects[one]) for one in at]
            for one in at[pool.get(hashes, pages) == _OK].tolist():
                found.set(one)
        loaded = [keys[one] for one in found.get_indices_list()]
        if loaded:
            self._notify_keys_accessed(loaded)
        return found

    def _find(self, keys: list[Any], layouts: Mapping[int, Any]) -> Any:
        found = Bitmap(len(keys))
        forms = [
            self._last.get((key.model_name, key.object_group_id))
            or Form.of_layout(key, layouts.get(key.object_group_id))
            for key in keys
        ]
        for _, pool, at, hashes in self._grouped(keys, forms):
            for one in at[pool.exists(hashes)].tolist():
                found.set(one)
        return found

    def _forms(self, keys: list[Any], objects: list[Any]) -> list[Form | None]:
        """Return the form of each object; None for what has no page."""
        forms: list[Form | None] = []
        for key, memory in zip(keys, objects, strict=True):
            form = None
            if self._arena.page(memory) < 0:
                what = "an object lies outside of LMCache's first level, or off its"
                self._log.warning("place", f"{what} alignment: it is not stored")
            else:
                form = Form.of_object(key, memory)
                self._last[key.model_name, key.object_group_id] = form
            forms.append(form)
        return forms

    def _grouped(
        self, keys: list[Any], forms: list[Form | None]
    ) -> Iterator[tuple[Form, AttachedPool, Int64Array, list[str]]]:
        """Yield the keys of each form that has a pool: its positions and hashes."""
        groups: dict[Form, list[int]] = {}
        for at, form in enumerate(forms):
            if form is not None:
                groups.setdefault(form, []).append(at)
        for form, own in groups.items():
            pool = self._pool(form)
            if pool is not None:
                hashes = [page_hash(keys[at]) for at in own]
                yield form, pool, np.array(own), hashes

    def _pool(self, form: Form) -> AttachedPool | None:
        """Return the pool of a form, attached when it is first met."""
        cache = self._attached.get(form)
        if cache is None:
            with self._attaching:
                cache = self._attached.get(form) or self._attach(form)
        return None if cache is None else cache[POOL]

    def _attach(self, form: Form) -> Attachment | None:
        given = self._given
        if time.monotonic() < self._retry_at.get(form, 0.0):
            return None
        if len(self._attached) >= MOST_FORMS:
            self._log.warning("forms", f"more than {MOST_FORMS} forms: {form} has none")
            return None
        try:
            plan = self._plan(form)
            cache = Attachment.open(
                self._dock,
                plan,
                form.namespace(given.own),
                {POOL: self._arena.region(form)},
                {n: own for n, own in given.backends.items() if n in plan.backends},
                core=given.core,
            )
        except KvdockError as error:
            self._retry_at[form] = time.monotonic() + _RETRY_S
            self._log.warning("attach", f"{form} cannot be stored: {error}", error)
            return None
        if deleted := self._deleted.get(form.model):
            self._forget(form, cache, list(deleted))
        self._attached[form] = cache
        log.info("kvdock stores objects of %s:\n%s", form, plan.explain())
        return cache

    def _plan(self, form: Form) -> Plan:
        given = self._given
        return self._dock.plan(
            [form.pool],
            Shard(),
            list(given.own.plugin),
            tiers=given.tiers,
            overrides=dict(given.own.routes),
            needs=RouteRequirements(
                integrity=given.core.integrity,
                staging=given.core.calls.staging,
                tenant_quotas=bool(given.core.tenants.rooms),
            ),
            settings=given.backends,
        )
