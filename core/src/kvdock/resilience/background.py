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
from kvdock.resilience.breaker import Breaker, BreakerState
from kvdock.resilience.executor import Room
from kvdock.synchronization import lock_and_condition, seconds_until
from kvdock.throttled_log import Complaints, told

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray
    from kvdock.config.core import CoreSettings
    from kvdock.plugin.backend import Backend
    from kvdock.resilience.executor import Crew


LOST = (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)
"""What speaks against a backend, if all of a batch ends like that."""


_PATIENCE = 2
"""Deletions that nobody waits for may take so many times their deadline."""


class Errands:
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
        crew: Crew,
        breakers: Mapping[Operation, Breaker],
        complaints: Complaints,
        tell: Callable[[Event], None] | None,
    ) -> None:
        self.drops = Drops()
        self._backend = backend
        self._core = core
        self._crew = crew
        self._breakers = breakers
        self._complaints = complaints
        self._tell = tell
        self._closed = False
        self._probe: Callable[[Operation, float], BatchResult] | None = None
        self._probing = {one: Room(core.breaker.probes) for one in Operation}
        self._dropping = Room(max(1, core.calls.overrun // 2))
        self._measuring = Room(1)
        asked = tell is not None and "kvdock_capacity" in backend.plugin.implemented
        self._measure_at_s = time.monotonic() if asked else math.inf

    def close(self) -> None:
        """Start nothing new."""
        self._closed = True

    def probe_with(self, probe: Callable[[Operation, float], BatchResult]) -> None:
        """Take a harmless call to find out whether the backend is back."""
        # One pool speaks for all: it is the backend that is back or is not.
        self._probe = self._probe or probe

    def probe(self, operation: Operation) -> None:
        """Start a probe for an operation that is cut off, if one is due."""
        probe, room = self._probe, self._probing[operation]
        if (
            self._closed
            or self._crew.forked
            or probe is None
            or not self._breakers[operation].wants_probe()
        ):
            return
        if self._crew.spent:
            # A probe that succeeds could let nobody through.
            self._hangs(operation, "calls", self._crew.behind)
        elif not self._crew.leave(room, lambda: self._run_probe(probe, operation)):
            self._hangs(operation, "probes", room.taken)

    def _hangs(self, operation: Operation, what: str, count: int) -> None:
        self._complaints.say(
            f"cut {operation} {what}",
            f"backend {self._backend.name}: {operation} stays cut off, and no probe is "
            f"started: {count} {what} have not ended",
        )

    def _run_probe(
        self, probe: Callable[[Operation, float], BatchResult], operation: Operation
    ) -> None:
        breaker = self._breakers[operation]
        deadline_s = time.monotonic() + self._core.breaker.probe
        alive = False
        try:
            alive = not np.isin(probe(operation, deadline_s).outcomes, LOST).any()
        except Exception as error:
            what = f"backend {self._backend.name}: a probe failed: {told(error)}"
            self._complaints.say("probe", what)
        finally:
            # An answer that comes late is no recovery, but a reason to look.
            if time.monotonic() > deadline_s:
                breaker.stirred()
            else:
                if alive:
                    self._forgive(operation)
                breaker.probed(alive=alive)

    def _forgive(self, operation: Operation) -> None:
        """Let nothing that hangs since before keep a backend out that works."""
        rooms = [self._probing[operation]]
        if operation is Operation.DELETE:
            rooms.append(self._dropping)
        self._crew.forgive(*rooms)

    def drop(self, handle: object, pool: str, keys: Sequence[str]) -> None:
        """Delete objects whose bytes are wrong, if there is room for that."""
        breaker = self._breakers[Operation.DELETE]
        for late in self.drops.overdue():
            self._late(late)
        if self._closed:
            return
        if not breaker.admits():
            self.probe(Operation.DELETE)
            return
        deadline_s = time.monotonic() + _PATIENCE * self._core.deadlines.delete
        drop = self.drops.begin(keys, deadline_s + self._core.deadlines.grace)
        if drop is None:
            breaker.undecided()
            return
        batch = Batch(Operation.DELETE, drop.keys, deadline_s=deadline_s, pool=pool)
        if not self._crew.leave(
            self._dropping, lambda: self._run_drop(drop, handle, batch)
        ):
            self.drops.end(drop)
            breaker.undecided()

    def _run_drop(self, drop: Drop, handle: object, batch: Batch) -> None:
        breaker = self._breakers[Operation.DELETE]
        lost = True
        try:
            lost = bool(
                np.isin(self._backend.batch_io(handle, batch).outcomes, LOST).all()
            )
        except Exception as error:
            self._complain_of_drop(drop, "raised", f"raised {told(error)}", error)
        finally:
            in_time = self.drops.end(drop)
            if time.monotonic() >= drop.give_up_s:
                if in_time:
                    self._late(drop)
                breaker.stirred()
            elif lost:
                breaker.failed()
            else:
                breaker.succeeded()

    def _late(self, drop: Drop) -> None:
        """Book a deletion that has been given up."""
        self._breakers[Operation.DELETE].failed(overran=True)
        self._complain_of_drop(drop, "late", "passed its deadline and was given up")

    def _complain_of_drop(
        self, drop: Drop, kind: str, what: str, error: Exception | None = None
    ) -> None:
        self._complaints.say(
            f"{kind} drop",
            f"backend {self._backend.name}: deleting {len(drop.keys)} objects that are "
            f"not what was stored {what}",
            error,
        )

    def measure(self, handle: object) -> None:
        """Ask how full the store is, if it is time to."""
        if time.monotonic() < self._measure_at_s or self._closed:
            return
        # One question at a time, and none to a backend that is cut off.
        self._measure_at_s = math.inf
        whole = all(one.state is BreakerState.CLOSED for one in self._breakers.values())
        if not whole or not self._crew.leave(
            self._measuring, lambda: self._run_measure(handle)
        ):
            self._measure_later()

    def _measure_later(self) -> None:
        self._measure_at_s = time.monotonic() + self._core.calls.capacity_every

    def _run_measure(self, handle: object) -> None:
        name = self._backend.name
        try:
            found = self._backend.capacity(handle)
        except Exception as error:
            what = f"backend {name}: asked how full it is: {told(error)}"
            self._complaints.say("capacity", what, error)
            found = None
        self._measure_later()
        if found is not None and self._tell is not None:
            self._tell(
                StoreFilled(
                    backend=name,
                    used_bytes=found.used_bytes,
                    limit_bytes=found.limit_bytes,
                )
            )


@attrs.frozen(eq=False)
class Drop:
    """One deletion.

    Args:
        keys: What it takes away.
        give_up_s: When it is given up, on `time.monotonic()`'s clock.
    """

    keys: tuple[str, ...]
    give_up_s: float


class Drops:
    """What one backend is about to forget."""

    def __init__(self) -> None:
        self._lock, self._changed = lock_and_condition()
        self._by_key: dict[str, Drop] = {}
        self._running: list[Drop] = []

    def __bool__(self) -> bool:
        """Whether anything may be being dropped."""
        return bool(self._by_key)

    def begin(self, keys: Sequence[str], give_up_s: float) -> Drop | None:
        """Note a deletion of those keys that nobody is dropping already."""
        with self._lock:
            self._forget_late()
            fresh = tuple(key for key in keys if key not in self._by_key)
            if not fresh:
                return None
            drop = Drop(fresh, give_up_s)
            self._running.append(drop)
            self._by_key.update(dict.fromkeys(fresh, drop))
            return drop

    def end(self, drop: Drop) -> bool:
        """Note that a deletion has ended; return whether it was expected."""
        with self._lock:
            expected = drop in self._running
            if expected:
                self._running.remove(drop)
                self._forget(drop)
            return expected

    def overdue(self) -> list[Drop]:
        """Return the deletions that were given up since the last time."""
        now = time.monotonic()
        with self._lock:
            late = [drop for drop in self._running if drop.give_up_s <= now]
            self._running = [drop for drop in self._running if drop not in late]
            self._forget_late()
            return late

    def among(self, keys: Sequence[str]) -> BoolArray:
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
            last_s = max((drop.give_up_s for drop in mine), default=deadline_s)
            self._changed.wait_for(
                lambda: self._by_key.keys().isdisjoint(keys),
                seconds_until(min(deadline_s, last_s)),
            )

    def _forget_late(self) -> None:
        now = time.monotonic()
        for drop in {one for one in self._by_key.values() if one.give_up_s <= now}:
            self._forget(drop)

    def _forget(self, drop: Drop) -> None:
        for key in drop.keys:
            # It may have been given up, and another one begun.
            if self._by_key.get(key) is drop:
                del self._by_key[key]
        self._changed.notify_all()
