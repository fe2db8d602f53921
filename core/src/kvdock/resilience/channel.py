"""Call one backend with a deadline, a circuit breaker and bounded concurrency.

A channel has the backend's executor, a breaker for each operation, and a
throttled log. A call of the engine is a job of that executor, and each batch of it one
call of the plugin (`io`). Whatever the plugin does, there is one outcome for
each key by the deadline.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import attrs
import numpy as np

from kvdock.arrays import any_of
from kvdock.batch import (
    Batch,
    BatchResult,
    MemoryHold,
    Operation,
    Outcome,
    is_whole,
    validate_result,
)
from kvdock.config.core import BreakerSettings
from kvdock.errors import AttachError, BatchError, KvdockError
from kvdock.events import (
    BreakerMoved,
    CallsBehind,
    Event,
    MemoryHeld,
    Origin,
    PagesAnswered,
    PoolsAttached,
)
from kvdock.pays.curves import LoadMeter
from kvdock.pays.policy import LIMIT
from kvdock.resilience.background import BACKEND_FAILURES, BackgroundTasks
from kvdock.resilience.breaker import BreakerState, CircuitBreaker
from kvdock.resilience.executor import Abandoned, DeadlineExecutor, Job, WorkerExit
from kvdock.resilience.negative_cache import NegativeCache
from kvdock.resilience.workers import CallRejected
from kvdock.synchronization import new_condition, remaining_s
from kvdock.throttled_log import ThrottledLog, describe_error

if TYPE_CHECKING:
    from kvdock.config.core import CoreSettings
    from kvdock.geometry.region import Region
    from kvdock.plugin.backend import Backend
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.plugin.store import PoolStore, WholeStore
    from kvdock.pools.spec import PoolSpec

log = logging.getLogger("kvdock")

T = TypeVar("T")

_MOVING = (Operation.PUT, Operation.GET)
_ABSENT = int(Outcome.ABSENT)

_GRACE_OF_LIMITS_S = 0.005
"""Most time past the limit of a load: a request waits for it that could compute."""
_PEERS = BreakerSettings(failures=1 << 62, abandoned_calls=1 << 62)
"""The breaker of SEND never opens: one dead peer must not cut off the others."""


class MemoryUse:
    """The memory that one batch may touch, until its call can no longer do so.

    Args:
        release: Releases it, once.

    Attributes:
        held: Whether a backend holds it beyond its answer.
        ended: Whether it is released.
    """

    __slots__ = ("_release", "ended", "held")

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self._release = release
        self.held = self.ended = False

    def end(self) -> None:
        """Release the memory, unless a backend holds it."""
        if not self.held:
            self.release()

    def release(self) -> None:
        """Release it, where the worker has returned or a backend ends its hold."""
        if not self.ended:
            self.ended = True
            if self._release is not None:
                self._release()

    def abandon(self) -> None:
        """Release what the engine gets back at once, as its call is abandoned."""


def as_kvdock_error(error: Exception) -> KvdockError:
    """Return a plugin's error, wrapped if it is not a KvdockError."""
    if isinstance(error, KvdockError):
        return error
    return AttachError(describe_error(error), fix="See `kvdock doctor`.")


def _validated(batch: Batch, answer: object) -> BatchResult | Exception:
    """Return a plugin's valid answer, or the error to record."""
    if isinstance(answer, Exception):
        return answer
    try:
        return validate_result(batch, answer)
    except Exception as error:  # noqa: BLE001 - plugin code
        return error


def _loaded_bytes(answer: object) -> int:
    """Return the bytes of an answer of which every key is loaded; else 0."""
    if not isinstance(answer, BatchResult) or any_of(answer.outcomes):
        return 0
    return int(np.add.reduce(answer.nbytes))


def _hold_of(answer: object) -> MemoryHold | None:
    """Return the hold of an answer that is not validated yet."""
    hold = answer.hold if isinstance(answer, BatchResult) else None
    return hold if isinstance(hold, MemoryHold) else None


class BackendChannel:
    """All calls to one backend.

    Attributes:
        executor: Runs the jobs of calls.
        listening: Whether there is any observer.
        observed: Whether one wants to know what calls took and moved.
        observes_pages: Whether one is told what became of each page.
    """

    def __init__(
        self, backend: Backend, core: CoreSettings, origin: Origin | None = None
    ) -> None:
        self.backend = backend
        self.name = backend.name
        self.negative_cache = NegativeCache(core.negative_cache)
        self.loads = LoadMeter()
        self.core = core
        self._grace_s = core.deadlines.grace
        self.executor = DeadlineExecutor(
            f"kvdock-{self.name}",
            core.calls.max_concurrent_calls,
            core.calls.max_abandoned_calls,
            self._notify_abandoned,
        )
        self._log = ThrottledLog()
        self._batch_hook = backend.batch_hook()
        self._calls_stores = backend.calls_stores
        # Called straight: the relay would cost each batch two microseconds.
        listening = [
            (
                partial(one.function, origin=origin or Origin())
                if "origin" in one.argnames
                else one.function,
                one.plugin,
            )
            for one in backend.plugin.hooks.kvdock_observe.get_hookimpls()
            if "event" in one.argnames
        ]
        self._listeners = tuple(listen for listen, _ in listening)
        self._page_listeners = tuple(
            listen
            for listen, plugin in listening
            if getattr(plugin, "observes_pages", False)
        )
        self.listening = bool(listening)
        self.observed = any(
            getattr(plugin, "observes_calls", True) for _, plugin in listening
        )
        self.observes_pages = bool(self._page_listeners)
        self._counting = threading.Lock()
        # Ended calls whose memory the backend still holds.
        self._held = 0
        self._hold_lock, self._hold_ended = new_condition()
        self._steps: list[Callable[[], None]] = []
        self._closing = False
        self._ending = threading.Lock()
        self.breakers: Mapping[Operation, CircuitBreaker] = {
            operation: CircuitBreaker(
                _PEERS if operation is Operation.SEND else core.breaker,
                self._on_breaker_change(operation),
            )
            for operation in Operation
        }
        self.background = BackgroundTasks(
            backend,
            core,
            self.executor,
            self.breakers,
            self._log,
            self.call,
            self.notify if self._listeners else None,
        )

    @property
    def abandoned_calls(self) -> int:
        """Abandoned calls and background tasks that have not ended."""
        return self.executor.abandoned

    def notify(self, event: Event) -> None:
        """Notify observers; log and swallow their exceptions."""
        self._tell(self._listeners, event)

    def notify_pages(self, event: PagesAnswered | PoolsAttached) -> None:
        """Notify the observers that are told of pages; as `notify`."""
        self._tell(self._page_listeners, event)

    def _tell(self, listeners: Iterable[Callable[..., object]], event: Event) -> None:
        for listen in listeners:
            try:
                listen(event=event)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - plugin code
                what = f"an observer failed: {describe_error(error)}"
                self._log.warning("observer", what, error)

    def notify_breakers(self) -> None:
        """Notify observers of the first state of every breaker."""
        for operation, breaker in self.breakers.items():
            self._notify_breaker(operation, breaker.state)

    def register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> WholeStore:
        """Register a pool's memory within its deadline.

        Raises:
            AttachError: If the backend rejects it, fails, or takes too long.
        """
        handle = self.call_attach(
            pool,
            lambda: self.backend.register_pool(pool, region, config),
            self._release_late,
        )
        self.on_close(lambda: self._release(handle))
        return handle

    def call_attach(
        self,
        pool: PoolSpec,
        call: Callable[[], T],
        late: Callable[[T], None],
        *,
        what: str = "attach",
        deadline_s: float | None = None,
    ) -> T:
        """Run a call that is not a batch within its deadline.

        `late` takes what an abandoned call returns. Without a deadline that of
        attaching holds.

        Raises:
            AttachError: If the call is rejected, fails, or takes too long.
        """
        end_s = deadline_s or self.core.deadlines.until("attach")
        timeout_s = round(max(0.0, end_s - time.monotonic()), 1)
        who = f"backend {self.name!r}"
        ran = self.executor.run(call, end_s, late=late)
        if ran.abandoned:
            raise AttachError(
                f"{who} did not {what} pool {pool.name!r} within {timeout_s:g} s",
                fix="See `kvdock doctor`, or raise core.deadlines.attach.",
            )
        if isinstance(ran.error, (CallRejected, WorkerExit)):
            what = f"{who} failed on pool {pool.name!r}: {ran.error}"
            raise AttachError(what) from ran.error
        if ran.error is not None:
            error = as_kvdock_error(ran.error)
            raise AttachError(
                f"{who} refuses pool {pool.name!r}: {error.what}", fix=error.fix
            ) from ran.error
        return cast("T", ran.result)

    def on_close(self, step: Callable[[], None]) -> None:
        """Add a step of closing; steps run in reverse order, without calls."""
        self._steps.append(step)

    def rejects(self, operation: Operation) -> bool:
        """Return whether a call would be rejected, before preparing one.

        Building the keys of a long prefix, or hashing pages that are not
        stored, would cost the engine more than the call that is not made.
        """
        if os.getpid() != self.executor.guard.pid:
            return True
        breaker = self.breakers[operation]
        if breaker.quiet and not (self._held or self.executor.abandoned):
            return False
        if operation in _MOVING and self._held >= self.core.calls.max_abandoned_calls:
            return True  # each more would keep pages from the engine
        if breaker.state is not BreakerState.OPEN:
            if not (self.executor.abandoned and self.executor.at_capacity):
                return False
            # Only a probe can find out whether calls that hang will ever end.
            breaker.trip()
        self.background.start_probe(operation)
        # A probe only starts here; calls stay rejected until it has ended.
        return True

    def log_corrupt(self, pool: str, objects: int) -> None:
        """Log that objects came back with other bytes than were stored."""
        self._log.warning(
            f"wrong {pool}",
            f"backend {self.name}: {objects} objects of pool {pool} are not what "
            "was stored; they count as misses and are dropped",
        )

    def log_staging_exhausted(self, pool: str) -> None:
        """Log that abandoned calls have all the staging memory of a pool."""
        self._log.warning(
            f"held {pool}",
            f"backend {self.name}: pool {pool} is rejected: abandoned calls "
            "hold all its staging memory until they end "
            "(core.calls.staging_buffers)",
        )

    def keep(self, hold: MemoryHold, use: MemoryUse | None) -> None:
        """Leave the memory of an answer with the backend until it ends its hold."""
        if use is not None:
            use.held = True
        with self._hold_lock:
            self._held += 1
        self._notify_held()
        hold.on_release(partial(self._release_held, use))

    def _release_held(self, use: MemoryUse | None) -> None:
        try:
            if use is not None:
                use.release()
        finally:
            with self._hold_lock:
                self._held -= 1
                self._hold_ended.notify_all()
            self._notify_held()

    def _none_held(self, deadline_s: float) -> bool:
        if not self._held:
            return True
        with self._hold_lock:
            return self._hold_ended.wait_for(
                lambda: not self._held, remaining_s(deadline_s)
            )

    def _notify_held(self) -> None:
        if self._listeners:
            with self._counting:
                self.notify(MemoryHeld(backend=self.name, batches=self._held))

    def close(self, deadline_s: float) -> bool:
        """Release every pool once no call is under way; return whether all has ended.

        A backend's client must not be closed under a call. If one is still
        running at the deadline, the pools are released when it ends.
        """
        if self.executor.guard.forked:
            return True  # the pools are the parent's, who releases them
        self._closing = True
        self.background.close()
        # Reject calls that have not started: none may run after release.
        self.executor.stop_accepting()
        # Serialize concurrent close() calls.
        if not self._ending.acquire(timeout=remaining_s(deadline_s)):
            return False
        try:
            # Releasing its last pool is what ends most holds of a backend.
            return self._release_handles(deadline_s) and self._none_held(deadline_s)
        finally:
            self._ending.release()

    def _release_handles(self, deadline_s: float) -> bool:
        # In reverse order: memory is released after the pools that use it.
        steps, self._steps = self._steps[::-1], []
        # Half of the time for calls under way, the rest for releasing.
        now = time.monotonic()
        if not self.executor.wait_idle(now + max(0.0, deadline_s - now) / 2):
            log.warning(
                "backend %s: closed with %d calls still running; its pools are "
                "released when they end",
                self.name,
                self.executor.abandoned,
            )
            return self.executor.shutdown(now, lambda: self._run_steps(steps))
        for at, step in enumerate(steps):
            end = min(deadline_s, self.core.deadlines.until("release"))
            share = (deadline_s - time.monotonic()) / (len(steps) - at)
            self._step_within(step, min(end, time.monotonic() + share))
        return self.executor.shutdown(deadline_s, lambda: None)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is under way, abandoned ones included."""
        deadline_s = time.monotonic() + timeout_s
        return self.executor.wait_idle(deadline_s) and self._none_held(deadline_s)

    def latest(self, deadline_s: float) -> float:
        """Return until when to wait for a call with this deadline: some grace."""
        if LIMIT.get() is not None:
            return deadline_s + _GRACE_OF_LIMITS_S
        return deadline_s + self._grace_s

    def call(
        self,
        handle: PoolStore,
        batch: Batch,
        job: Job | None = None,
        use: MemoryUse | None = None,
    ) -> BatchResult:
        """Run a batch as a call of its own; one outcome for each key, by its deadline.

        Args:
            handle: The pool's store.
            batch: What to do, with a deadline; no more keys than the backend
                takes at once.
            job: That of the larger call that it belongs to.
            use: Its memory, which is released here: late, if the call is abandoned or
                the backend holds it; None where it moves no bytes.
        """

        def work(job: Job) -> BatchResult:
            try:
                return self.io(job, handle, batch, use)
            finally:
                if use is not None:
                    use.end()

        latest_s = self.latest(batch.deadline_s)
        late = None if use is None else lambda _: use.end()
        ran = self.executor.work(work, latest_s, job, late=late)
        if ran.abandoned:
            return BatchResult.all(batch, Outcome.TIMEOUT)
        if ran.error is None:
            result: BatchResult = ran.result
            return result
        if use is not None:
            use.end()
        outcome = self.rejected(batch.operation, batch.pool, len(batch), ran.error)
        return BatchResult.all(batch, outcome)

    def io(
        self, job: Job, handle: PoolStore, batch: Batch, use: MemoryUse | None
    ) -> BatchResult:
        """Run one batch of a job, on its thread; one outcome for each key.

        Raises:
            Abandoned: At the end of a call that was abandoned.
        """
        operation = batch.operation
        breaker = self.breakers[operation]
        if batch.deadline_s <= time.monotonic():
            return BatchResult.all(batch, Outcome.TIMEOUT)
        if self._closing or not (breaker.quiet or breaker.allows_call()):
            self.background.start_probe(operation)
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        loads = operation is Operation.GET
        began = self.loads.time.advance(1)[0] if loads else 0.0
        # Its end is a decision, and says nothing about the backend.
        decided = loads and LIMIT.get() is not None
        grace_s = _GRACE_OF_LIMITS_S if decided else self._grace_s
        answer: object
        job.leave(
            batch.deadline_s + grace_s,
            partial(self._record_overrun, breaker, batch, began, decided, use),
        )
        try:
            if self._calls_stores and batch.remote is None:
                answer = handle.run(batch)
            else:  # what sends to a peer finds its own way
                answer = self._batch_hook(store=handle, batch=batch)
        except Exception as error:  # noqa: BLE001 - plugin code
            answer = error
        except BaseException as error:  # noqa: BLE001 - same, but it must not end the thread
            answer = WorkerExit(repr(error))
        if not job.resume():
            self._on_late_end(answer, batch, began, use)
            raise Abandoned
        if is_whole(answer, batch):  # the usual answer takes no further look
            if loads:
                self.loads.end(began, batch.pool, int(np.add.reduce(answer.nbytes)))
            if not breaker.quiet:
                breaker.record_success()
            return answer
        return self._record_answer(breaker, batch, answer, began, decided, use)

    def _record_answer(
        self,
        breaker: CircuitBreaker,
        batch: Batch,
        answer: object,
        began: float,
        decided: bool,  # noqa: FBT001 - whether the deadline was a decision
        use: MemoryUse | None,
    ) -> BatchResult:
        """Hold any answer against its batch, and record it."""
        result = _validated(batch, answer)
        if batch.operation is Operation.GET:
            self.loads.end(began, batch.pool, _loaded_bytes(result))
        if isinstance(result, Exception):
            # Storage never stops an engine: these keys are a miss.
            self._record_failure(breaker, batch, result)
            hold = _hold_of(answer)
            result = attrs.evolve(BatchResult.all(batch, Outcome.ERROR), hold=hold)
        else:
            self._record_result(breaker, batch, result, decided=decided)
        if result.hold is not None and not result.hold.released:
            # Like a late call: the memory is not free yet.
            what = "ended, but its library may still move bytes: the pages stay leased"
            self._log_failure("held", batch, what)
            self.keep(result.hold, use)
        return result

    def _record_overrun(
        self,
        breaker: CircuitBreaker,
        batch: Batch,
        began: float,
        decided: bool,  # noqa: FBT001 - whether the deadline was a decision
        use: MemoryUse | None,
        overran: bool,  # noqa: FBT001 - whether it was late, or interrupted
    ) -> None:
        """Record a call that is abandoned, and release what the engine gets back."""
        try:
            if batch.operation is Operation.GET:
                nbytes = int(batch.object_bytes.sum()) if overran else 0
                self.loads.abandon(began, batch.pool, nbytes)
            if decided or not overran:
                breaker.record_ignored()
            else:
                breaker.record_failure(overran=True)
                what = "passed its deadline and was abandoned"
                self._log_failure("late", batch, what)
        finally:
            if use is not None:
                use.abandon()

    def rejected(
        self, operation: Operation, pool: str, keys: int, error: Exception
    ) -> Outcome:
        """Return the outcome of a call that was not started, and log why.

        Raises:
            Exception: `error`, if it is another one: a defect of ours.
        """
        if not isinstance(error, CallRejected):
            raise error
        cut = "too many calls are abandoned" if self.executor.at_capacity else ""
        why = str(error) or cut
        self._log.warning(
            f"rejected {operation} {pool}",
            f"backend {self.name}: {operation} of {keys} keys of pool {pool} was not "
            f"started: {why or 'it is busy'}",
        )
        return Outcome.UNAVAILABLE if why else Outcome.TIMEOUT

    def _record_failure(
        self, breaker: CircuitBreaker, batch: Batch, error: Exception
    ) -> None:
        """Record a call that raised, or broke the contract."""
        breaker.record_failure()
        if isinstance(error, BatchError):
            self._log_failure("contract", batch, f"broke the contract: {error}")
        else:
            self._log_failure("raised", batch, f"raised {describe_error(error)}", error)

    def _record_result(
        self,
        breaker: CircuitBreaker,
        batch: Batch,
        result: BatchResult,
        *,
        decided: bool,
    ) -> None:
        """Record an answer that came in time as a success or a failure."""
        if not any_of(result.outcomes > _ABSENT):  # nothing failed
            breaker.record_success()
            return
        if decided and np.any(result.outcomes == Outcome.TIMEOUT):
            breaker.record_ignored()
            return
        lost = np.isin(result.outcomes, BACKEND_FAILURES)
        if lost.all() and len(lost):
            breaker.record_failure()
        else:
            breaker.record_success()
        if lost.any():
            worst = Outcome(int(result.outcomes[lost][0])).name.lower()
            what = f"lost {int(lost.sum())} of them, the first with {worst}"
            self._log_failure(f"lost {worst}", batch, what)

    def _log_failure(
        self, kind: str, batch: Batch, what: str, error: Exception | None = None
    ) -> None:
        self._log.warning(
            f"{kind} {batch.operation} {batch.pool}",
            f"backend {self.name}: {batch.operation} of {len(batch)} keys of pool "
            f"{batch.pool} {what}",
            error,
        )

    def _on_late_end(
        self, answer: object, batch: Batch, began: float, use: MemoryUse | None
    ) -> None:
        if batch.operation is Operation.GET:
            self.loads.end(began, batch.pool, _loaded_bytes(answer), late=True)
        hold = _hold_of(answer)
        if hold is not None:
            self.keep(hold, use)
        for breaker in self.breakers.values():
            breaker.on_late_end()

    def _notify_abandoned(self) -> None:
        if self._listeners:
            # Under a lock, so that the last event has the last number.
            with self._counting:
                self.notify(CallsBehind(backend=self.name, calls=self.abandoned_calls))

    def _on_breaker_change(
        self, operation: Operation
    ) -> Callable[[BreakerState], None]:
        def moved(state: BreakerState) -> None:
            level = log.warning if state is BreakerState.OPEN else log.info
            level("backend %s: breaker for %s is %s", self.name, operation, state)
            self._notify_breaker(operation, state)

        return moved

    def _notify_breaker(self, operation: Operation, state: BreakerState) -> None:
        self.notify(
            BreakerMoved(backend=self.name, operation=operation, state=str(state))
        )

    def _step_within(self, step: Callable[[], None], deadline_s: float) -> None:
        ran = self.executor.run(
            lambda: self._run_steps([step]), deadline_s, closes=True
        )
        if ran.abandoned:
            log.warning("backend %s: releasing a pool takes too long", self.name)
        elif ran.error is not None:
            log.warning("backend %s: a pool is not released: %s", self.name, ran.error)

    def _run_steps(self, steps: list[Callable[[], None]]) -> None:
        for step in steps:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - run the other steps all the same
                what = (
                    f"backend {self.name}: closing failed with {describe_error(error)}"
                )
                self._log.warning("closing", what, error)

    def _release(self, handle: PoolStore) -> None:
        try:
            handle.close()
        except Exception as error:  # noqa: BLE001 - plugin code
            self._log.warning(
                "release", f"backend {self.name} failed to release a pool", error
            )

    def _release_late(self, handle: PoolStore | None) -> None:
        if handle is not None:
            self._release(handle)
