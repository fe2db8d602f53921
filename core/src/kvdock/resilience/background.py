"""Background tasks of one backend: probes, deletions, touches, capacity polls.

Each kind has a quota of its own, so that a task that hangs takes no threads
from the other kinds, nor from the engine's calls.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.events import Event, StoreFilled
from kvdock.resilience.breaker import BreakerState, CircuitBreaker
from kvdock.resilience.executor import ConcurrencyQuota
from kvdock.synchronization import new_condition, remaining_s
from kvdock.throttled_log import ThrottledLog, describe_error

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray
    from kvdock.config.core import CoreSettings
    from kvdock.plugin.backend import Backend
    from kvdock.plugin.store import PoolStore, WholeStore
    from kvdock.resilience.executor import DeadlineExecutor, Job


BACKEND_FAILURES = (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)
"""Outcomes that count as a failure of the backend if a whole batch ends so."""


DELETE_DEADLINE_FACTOR = 2
"""Background deletions may take so many times their deadline."""


_TOUCHED_PAGES = 1 << 16
"""Pages whose use may wait to be noted: some seconds of a busy engine."""


class BackgroundTasks:
    """The background tasks of one channel."""

    def __init__(
        self,
        backend: Backend,
        core: CoreSettings,
        executor: DeadlineExecutor,
        breakers: Mapping[Operation, CircuitBreaker],
        throttled: ThrottledLog,
        call: Callable[[PoolStore, Batch, Job], object],
        notify: Callable[[Event], None] | None,
    ) -> None:
        self.pending_deletes = PendingDeletes()
        self._backend = backend
        self._max_keys = backend.manifest.max_batch_keys
        self._core = core
        self._executor = executor
        self._breakers = breakers
        self._log = throttled
        self._call = call
        self._notify = notify
        self._closed = False
        self._probe: Callable[[Operation, float], BatchResult] | None = None
        self._probe_quotas = {
            one: ConcurrencyQuota(core.breaker.max_hanging_probes) for one in Operation
        }
        self._delete_quota = ConcurrencyQuota(
            max(1, core.calls.max_abandoned_calls // 2)
        )
        self._touches = PendingTouches(_TOUCHED_PAGES)
        self._touch_quota = ConcurrencyQuota(1)
        self._removal_quota = ConcurrencyQuota(1)
        self._poll_quota = ConcurrencyQuota(1)
        polled = notify is not None and bool(backend.manifest.capacity)
        self._poll_at_s = time.monotonic() if polled else math.inf

    def close(self) -> None:
        """Start nothing new."""
        self._closed = True

    def set_health_check(
        self, probe: Callable[[Operation, float], BatchResult]
    ) -> None:
        """Set the harmless call that finds out whether the backend is back."""
        # One pool speaks for all: it is the backend that is back or is not.
        self._probe = self._probe or probe

    def start_probe(self, operation: Operation) -> None:
        """Start a probe for an operation whose breaker is open, if one is due."""
        probe, quota = self._probe, self._probe_quotas[operation]
        if (
            self._closed
            or self._executor.guard.forked
            or probe is None
            or not self._breakers[operation].probe_due()
        ):
            return
        if self._executor.exhausted:
            # Calls would stay rejected even after a successful probe.
            self._hangs(operation, "calls", self._executor.abandoned)
        elif not self._executor.spawn(
            quota, lambda _: self._run_probe(probe, operation)
        ):
            self._hangs(operation, "probes", quota.taken)

    def _hangs(self, operation: Operation, what: str, count: int) -> None:
        self._log.warning(
            f"cut {operation} {what}",
            f"backend {self._backend.name}: {operation} stays cut off, and no probe is "
            f"started: {count} {what} have not ended",
        )

    def _run_probe(
        self, probe: Callable[[Operation, float], BatchResult], operation: Operation
    ) -> None:
        breaker = self._breakers[operation]
        deadline_s = time.monotonic() + self._core.breaker.probe_timeout
        alive = False
        with self._logged("probe", "a probe failed"):
            try:
                alive = not np.isin(
                    probe(operation, deadline_s).outcomes, BACKEND_FAILURES
                ).any()
            finally:
                # A late answer is not a recovery, but a reason to probe again.
                if time.monotonic() > deadline_s:
                    breaker.on_late_end()
                else:
                    if alive:
                        self._discount_abandoned(operation)
                    breaker.record_probe(alive=alive)

    @contextmanager
    def _logged(self, kind: str, what: str) -> Iterator[None]:
        """Log what the code of a plugin raises."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - plugin code
            what = f"backend {self._backend.name}: {what}: {describe_error(error)}"
            self._log.warning(kind, what, error)

    def _discount_abandoned(self, operation: Operation) -> None:
        """Discount calls abandoned before a successful probe."""
        quotas = [self._probe_quotas[operation]]
        if operation is Operation.DELETE:
            quotas.append(self._delete_quota)
        self._executor.discount_abandoned(*quotas)

    def delete_corrupt(self, handle: PoolStore, pool: str, keys: Sequence[str]) -> None:
        """Delete objects whose bytes are wrong, if the quota allows it."""
        if self._closed:
            return
        if self._breakers[Operation.DELETE].state is BreakerState.OPEN:
            self.start_probe(Operation.DELETE)
            return
        fresh = self.pending_deletes.start(keys)
        deadline_s = self._core.deadlines.until(
            Operation.DELETE, factor=DELETE_DEADLINE_FACTOR
        )
        batch = Batch(Operation.DELETE, fresh, deadline_s=deadline_s, pool=pool)
        if fresh and not self._executor.spawn(
            self._delete_quota,
            partial(self._delete, handle, batch, fresh),
            watched=True,
        ):
            self.pending_deletes.finish(fresh)

    def _delete(
        self, handle: PoolStore, batch: Batch, keys: tuple[str, ...], job: Job
    ) -> None:
        """Delete in batches that the backend takes."""
        job.on_lost = partial(self.pending_deletes.finish, keys)
        try:
            step = self._max_keys or len(batch)
            for start in range(0, len(batch), step):
                if start and self._closed:
                    break
                self._call(handle, batch.part(start, start + step), job)
        finally:
            self.pending_deletes.finish(keys)

    def touch(self, handle: WholeStore, pages: int, keys: KeyBuilder) -> bool:
        """Note the use of pages; return whether that will be passed on."""
        touches = self._backend.manifest.touch
        if self._closed or self._executor.guard.forked or not touches:
            return False
        if not self._touches.add(handle, pages, keys):
            return False
        # One that runs takes what has come meanwhile.
        self._executor.spawn(self._touch_quota, lambda _: self._run_touches())
        return True

    def _run_touches(self) -> None:
        while not self._closed and (one := self._touches.pop()):
            handle, keys = one
            names = keys()
            step = self._max_keys or max(1, len(names))
            for start in range(0, len(names), step):
                with self._logged("touch", "noting which pages are used"):
                    handle.touch(names[start : start + step])

    def poll_removed(
        self, handle: WholeStore, limit: int, report: Callable[[Sequence[str]], None]
    ) -> None:
        """Ask which stored objects are gone, unless the backend is being asked.

        `report` is called with their keys, on the executor's thread, and `limit` bounds
        the keys to keep track of.
        """

        def poll(_: object) -> None:
            with self._logged("removed", "asked what it has removed"):
                report(handle.removed(limit))

        self._executor.spawn(self._removal_quota, poll)

    def poll_capacity(self, handle: WholeStore) -> None:
        """Ask the backend how full its store is, if a poll is due."""
        if time.monotonic() < self._poll_at_s or self._closed:
            return
        # One poll at a time, and none while a breaker is open.
        self._poll_at_s = math.inf
        whole = all(one.state is BreakerState.CLOSED for one in self._breakers.values())
        if not whole or not self._executor.spawn(
            self._poll_quota, lambda _: self._run_poll(handle)
        ):
            self._schedule_poll()

    def _schedule_poll(self) -> None:
        self._poll_at_s = time.monotonic() + self._core.calls.capacity_interval

    def _run_poll(self, handle: WholeStore) -> None:
        filled = None
        with self._logged("capacity", "asked how full it is"):
            capacity = handle.capacity()
            if capacity is not None:
                level = attrs.asdict(capacity, recurse=False)
                filled = StoreFilled(backend=self._backend.name, **level)
        self._schedule_poll()
        if filled is not None and self._notify is not None:
            self._notify(filled)


KeyBuilder = Callable[[], Sequence[str]]


class PendingTouches:
    """Pages whose use is still to be noted.

    Args:
        limit: Most pages; more are not noted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages = 0
        self._waiting: deque[tuple[WholeStore, int, KeyBuilder]] = deque()

    def add(self, handle: WholeStore, pages: int, keys: KeyBuilder) -> bool:
        """Add pages of a pool; return False if too many wait."""
        with self._lock:
            if self._pages + pages > self._limit:
                return False
            self._pages += pages
            self._waiting.append((handle, pages, keys))
        return True

    def pop(self) -> tuple[WholeStore, KeyBuilder] | None:
        """Return the pool's store and the keys of the pages that wait longest."""
        with self._lock:
            if not self._waiting:
                return None
            handle, pages, keys = self._waiting.popleft()
            self._pages -= pages
        return handle, keys


class PendingDeletes:
    """The keys that one backend is about to delete.

    Attributes:
        by_key: Each key with those that are deleted with it; empty where none is.
    """

    def __init__(self) -> None:
        self._lock, self._changed = new_condition()
        self.by_key: dict[str, tuple[str, ...]] = {}

    def start(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Start a deletion; return those keys that are not being deleted already."""
        with self._lock:
            fresh = tuple(key for key in keys if key not in self.by_key)
            self.by_key.update(dict.fromkeys(fresh, fresh))
            return fresh

    def finish(self, keys: tuple[str, ...]) -> None:
        """Finish the deletion that returned these keys, or give it up."""
        with self._lock:
            for key in keys:
                # It may have been given up, and another deletion started.
                if self.by_key.get(key) is keys:
                    del self.by_key[key]
            self._changed.notify_all()

    def pending(self, keys: Sequence[str]) -> BoolArray:
        """Return which of these are being deleted, bool (n,)."""
        with self._lock:
            return np.array([key in self.by_key for key in keys], np.bool_)

    def wait(self, keys: Sequence[str], deadline_s: float) -> None:
        """Wait until none of these is being deleted, or until a deadline."""
        with self._lock:
            self._changed.wait_for(
                lambda: self.by_key.keys().isdisjoint(keys), remaining_s(deadline_s)
            )
