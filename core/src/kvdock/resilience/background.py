"""What one backend is asked in the background, while nobody waits.

Probes, deletions of wrong objects, and the question how full the store is.
Each kind has room of its own, so that one that hangs takes nothing from the
others, nor from the engine's calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
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
    from kvdock.resilience.executor import DeadlineExecutor


BACKEND_FAILURES = (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)
"""What speaks against a backend, if all of a batch ends like that."""


DELETE_DEADLINE_FACTOR = 2
"""Deletions that nobody waits for may take so many times their deadline."""


class BackgroundTasks:
    """The background work of one line.

    Args:
        backend: Who is asked.
        core: Deadlines and bounds.
        crew: Whose threads do it.
        breakers: The line's own, by operation.
        complaints: The line's log.
        tell: Passes an event to observers, if anybody is to be told how full
            the store is.
    """

    def __init__(
        self,
        backend: Backend,
        core: CoreSettings,
        executor: DeadlineExecutor,
        breakers: Mapping[Operation, CircuitBreaker],
        complaints: ThrottledLog,
        tell: Callable[[Event], None] | None,
    ) -> None:
        self.pending_deletes = PendingDeletes()
        self._backend = backend
        self._max_keys = backend.manifest.max_batch_keys
        self._core = core
        self._executor = executor
        self._breakers = breakers
        self._complaints = complaints
        self._tell = tell
        self._closed = False
        self._probe: Callable[[Operation, float], BatchResult] | None = None
        self._probing = {
            one: ConcurrencyQuota(core.breaker.max_hanging_probes) for one in Operation
        }
        self._dropping = ConcurrencyQuota(max(1, core.calls.max_abandoned_calls // 2))
        self._measuring = ConcurrencyQuota(1)
        asked = tell is not None and "kvdock_capacity" in backend.plugin.implemented
        self._measure_at_s = time.monotonic() if asked else math.inf

    def close(self) -> None:
        """Start nothing new."""
        self._closed = True

    def set_health_check(
        self, probe: Callable[[Operation, float], BatchResult]
    ) -> None:
        """Take a harmless call to find out whether the backend is back."""
        # One pool speaks for all: it is the backend that is back or is not.
        self._probe = self._probe or probe

    def start_probe(self, operation: Operation) -> None:
        """Start a probe for an operation that is cut off, if one is due."""
        probe, quota = self._probe, self._probing[operation]
        if (
            self._closed
            or self._executor.guard.forked
            or probe is None
            or not self._breakers[operation].probe_due()
        ):
            return
        if self._executor.exhausted:
            # A probe that succeeds could let nobody through.
            self._hangs(operation, "calls", self._executor.abandoned)
        elif not self._executor.spawn(quota, lambda: self._run_probe(probe, operation)):
            self._hangs(operation, "probes", quota.taken)

    def _hangs(self, operation: Operation, what: str, count: int) -> None:
        self._complaints.warning(
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
        try:
            alive = not np.isin(
                probe(operation, deadline_s).outcomes, BACKEND_FAILURES
            ).any()
        except Exception as error:  # noqa: BLE001 - a stranger's code
            what = (
                f"backend {self._backend.name}: a probe failed: {describe_error(error)}"
            )
            self._complaints.warning("probe", what)
        finally:
            # An answer that comes late is no recovery, but a reason to look.
            if time.monotonic() > deadline_s:
                breaker.on_late_end()
            else:
                if alive:
                    self._discount_abandoned(operation)
                breaker.record_probe(alive=alive)

    def _discount_abandoned(self, operation: Operation) -> None:
        """Let nothing that hangs since before keep a backend out that works."""
        rooms = [self._probing[operation]]
        if operation is Operation.DELETE:
            rooms.append(self._dropping)
        self._executor.discount_abandoned(*rooms)

    def delete_corrupt(self, handle: object, pool: str, keys: Sequence[str]) -> None:
        """Delete objects whose bytes are wrong, if there is room for that."""
        breaker = self._breakers[Operation.DELETE]
        for late in self.pending_deletes.expired():
            self._late(late)
        if self._closed:
            return
        if not breaker.allows_call():
            self.start_probe(Operation.DELETE)
            return
        deadline_s = self._core.deadlines.until(
            Operation.DELETE, factor=DELETE_DEADLINE_FACTOR
        )
        delete = self.pending_deletes.start(
            keys, deadline_s + self._core.deadlines.grace
        )
        if delete is None:
            breaker.record_ignored()
            return
        batch = Batch(Operation.DELETE, delete.keys, deadline_s=deadline_s, pool=pool)
        if not self._executor.spawn(
            self._dropping, lambda: self._run_delete(delete, handle, batch)
        ):
            self.pending_deletes.finish(delete)
            breaker.record_ignored()

    def _run_delete(self, delete: PendingDelete, handle: object, batch: Batch) -> None:
        breaker = self._breakers[Operation.DELETE]
        lost = True
        try:
            lost = self._delete(handle, batch)
        except Exception as error:  # noqa: BLE001 - a stranger's code
            self._log_delete_failure(
                delete, "raised", f"raised {describe_error(error)}", error
            )
        finally:
            in_time = self.pending_deletes.finish(delete)
            if time.monotonic() >= delete.expires_s:
                if in_time:
                    self._late(delete)
                breaker.on_late_end()
            elif lost:
                breaker.record_failure()
            else:
                breaker.record_success()

    def _delete(self, handle: object, batch: Batch) -> bool:
        """Delete in batches that the backend takes; return whether all failed."""
        lost = True
        step = self._max_keys or len(batch)
        for start in range(0, len(batch), step):
            if start and (self._closed or time.monotonic() >= batch.deadline_s):
                break
            part = batch.part(start, start + step)
            outcomes = self._backend.batch_io(handle, part).outcomes
            lost = lost and bool(np.isin(outcomes, BACKEND_FAILURES).all())
        return lost

    def _late(self, delete: PendingDelete) -> None:
        """Book a deletion that has been given up."""
        self._breakers[Operation.DELETE].record_failure(overran=True)
        self._log_delete_failure(delete, "late", "passed its deadline and was given up")

    def _log_delete_failure(
        self,
        delete: PendingDelete,
        kind: str,
        what: str,
        error: Exception | None = None,
    ) -> None:
        self._complaints.warning(
            f"{kind} drop",
            f"backend {self._backend.name}: deleting {len(delete.keys)} objects that "
            f"are not what was stored {what}",
            error,
        )

    def poll_capacity(self, handle: object) -> None:
        """Ask how full the store is, if it is time to."""
        if time.monotonic() < self._measure_at_s or self._closed:
            return
        # One question at a time, and none to a backend that is cut off.
        self._measure_at_s = math.inf
        whole = all(one.state is BreakerState.CLOSED for one in self._breakers.values())
        if not whole or not self._executor.spawn(
            self._measuring, lambda: self._run_poll(handle)
        ):
            self._schedule_poll()

    def _schedule_poll(self) -> None:
        self._measure_at_s = time.monotonic() + self._core.calls.capacity_interval

    def _run_poll(self, handle: object) -> None:
        name = self._backend.name
        try:
            found = self._backend.capacity(handle)
        except Exception as error:  # noqa: BLE001 - a stranger's code
            what = f"backend {name}: asked how full it is: {describe_error(error)}"
            self._complaints.warning("capacity", what, error)
            found = None
        self._schedule_poll()
        if found is not None and self._tell is not None:
            self._tell(
                StoreFilled(
                    backend=name,
                    used_bytes=found.used_bytes,
                    limit_bytes=found.limit_bytes,
                )
            )


@attrs.frozen(eq=False)
class PendingDelete:
    """One deletion.

    Args:
        keys: What it takes away.
        give_up_s: When it is given up, on `time.monotonic()`'s clock.
    """

    keys: tuple[str, ...]
    expires_s: float


class PendingDeletes:
    """What one backend is about to forget."""

    def __init__(self) -> None:
        self._lock, self._changed = new_condition()
        self._by_key: dict[str, PendingDelete] = {}
        self._running: list[PendingDelete] = []

    def __bool__(self) -> bool:
        """Whether anything may be being dropped."""
        return bool(self._by_key)

    def start(self, keys: Sequence[str], give_up_s: float) -> PendingDelete | None:
        """Note a deletion of those keys that nobody is dropping already."""
        with self._lock:
            self._forget_late()
            fresh = tuple(key for key in keys if key not in self._by_key)
            if not fresh:
                return None
            delete = PendingDelete(fresh, give_up_s)
            self._running.append(delete)
            self._by_key.update(dict.fromkeys(fresh, delete))
            return delete

    def finish(self, delete: PendingDelete) -> bool:
        """Note that a deletion has ended; return whether it was expected."""
        with self._lock:
            expected = delete in self._running
            if expected:
                self._running.remove(delete)
                self._forget(delete)
            return expected

    def expired(self) -> list[PendingDelete]:
        """Return the deletions that were given up since the last time."""
        now = time.monotonic()
        with self._lock:
            late = [delete for delete in self._running if delete.expires_s <= now]
            self._running = [delete for delete in self._running if delete not in late]
            self._forget_late()
            return late

    def pending(self, keys: Sequence[str]) -> BoolArray:
        """Return which of these are being dropped, bool (n,)."""
        with self._lock:
            self._forget_late()
            return np.array([key in self._by_key for key in keys], np.bool_)

    def wait(self, keys: Sequence[str], deadline_s: float) -> None:
        """Wait until none of these is being dropped, or until a deadline.

        Deletions that are given up meanwhile are not waited for any longer.
        """
        with self._lock:
            mine = {self._by_key[key] for key in keys if key in self._by_key}
            last_s = max((delete.expires_s for delete in mine), default=deadline_s)
            self._changed.wait_for(
                lambda: self._by_key.keys().isdisjoint(keys),
                remaining_s(min(deadline_s, last_s)),
            )

    def _forget_late(self) -> None:
        now = time.monotonic()
        for delete in {one for one in self._by_key.values() if one.expires_s <= now}:
            self._forget(delete)

    def _forget(self, delete: PendingDelete) -> None:
        for key in delete.keys:
            # It may have been given up, and another one begun.
            if self._by_key.get(key) is delete:
                del self._by_key[key]
        self._changed.notify_all()
