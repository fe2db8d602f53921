"""Health check: one test page per pool, to find out whether a backend works.

The self test stores, finds, loads, compares and deletes it when memory is
attached; a breaker probes with it before it allows an engine's call. Both use
what real pages use: the pool's keys, its pieces of memory, its trailers.

A probe that hangs keeps its memory, and the next one must not wait for that.
So all share two buffers: every probe stores the same bytes, and only the self
test reads what was loaded.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.keys import build_keys
from kvdock.plugin.hookspecs import Finding
from kvdock.resilience.channel import MemoryUse

if TYPE_CHECKING:
    from kvdock.plugin.store import PoolStore
    from kvdock.resilience.channel import BackendChannel
    from kvdock.transfer.staging import StagingBuffer, StagingBuffers


_DROP_S = 2.0
"""How long a backend may try to delete what the self test has just read."""


@attrs.frozen(eq=False)
class HealthCheck:
    """The test page of one pool.

    Args:
        keys: The keys of the page's objects, of no page of an engine.
        stored: The page as it is stored, or None for a pool without bytes.
        loaded: Where it is loaded to, or None for such a pool.
    """

    pool: str
    channel: BackendChannel
    handle: PoolStore = attrs.field(repr=False)
    keys: tuple[str, ...]
    stored: StagingBuffer | None = attrs.field(repr=False)
    loaded: StagingBuffer | None = attrs.field(repr=False)

    @classmethod
    def of(
        cls,
        channel: BackendChannel,
        handle: PoolStore,
        keys: tuple[str, str, tuple[str, ...]],
        staging: StagingBuffers | None,
    ) -> HealthCheck:
        """Make a test page in the two buffers of `staging`.

        `keys` are pool, namespace and suffixes. A pool without bytes has no staging.
        """
        pool, namespace, suffixes = keys
        # Each process has its own test page, so that no other one deletes it.
        mine = hashlib.sha256(os.urandom(16)).hexdigest()
        names = build_keys(namespace, [mine], suffixes)
        buffers = [staging.reserve() if staging else None for _ in range(2)]
        check = cls(pool, channel, handle, tuple(names), *buffers)
        if check.stored is not None:
            check._fill(check.stored)
        return check

    def run(self, operation: Operation, deadline_s: float) -> BatchResult:
        """Make one harmless call of a kind, without asking the breaker.

        A call that stores cleans up after itself.
        """
        if operation in (Operation.CLEAR, Operation.SEND):
            # Clearing would delete the pages of the engine as well, and there is
            # no peer to send to.
            operation = Operation.EXISTS
        result = self._call(operation, deadline_s)
        if operation is Operation.PUT:
            self._call(Operation.DELETE, deadline_s)
        return result

    def self_test(self, timeout_s: float) -> tuple[Finding, ...]:
        """Store, find, load, compare and delete the page; return the findings.

        Some backends remove nothing that was read a moment ago. That is not a
        fault: they remove the page later.

        Raises:
            KvdockError: If the attachment is closed.
        """
        memory = self.loaded.staging if self.loaded is not None else None
        if memory is None:
            return self._self_test(timeout_s)
        if not memory.enter():
            raise KvdockError("the attachment is closed")
        try:
            return self._self_test(timeout_s)
        finally:
            memory.leave()

    def _self_test(self, timeout_s: float) -> tuple[Finding, ...]:
        steps = (
            ("stored", Operation.PUT),
            ("found", Operation.EXISTS),
            ("read back", Operation.GET),
            ("dropped", Operation.DELETE),
        )
        findings = []
        for done, operation in steps:
            drops = operation is Operation.DELETE
            allowed_s = min(timeout_s, _DROP_S) if drops else timeout_s
            deadline_s = self.channel.core.deadlines.until(operation, allowed_s)
            outcome = self._step(operation, deadline_s)
            findings.append(self._finding(done, operation, outcome))
            if outcome is not Outcome.OK and operation is Operation.PUT:
                break
        return tuple(findings)

    def _finding(self, done: str, operation: Operation, outcome: Outcome) -> Finding:
        became = done if outcome is Outcome.OK else f"not {done}"
        what = f"pool {self.pool}: a page was {became} by {self.channel.name}"
        if outcome is Outcome.OK:
            return Finding(ok=True, what=what)
        if operation is Operation.DELETE and outcome is Outcome.REFUSED:
            why = ", which keeps for a while what was just read"
            return Finding(ok=True, what=what + why)
        return Finding(ok=False, what=what, hint=self._hint(operation, outcome))

    def _hint(self, operation: Operation, outcome: Outcome) -> str:
        said = f"The outcome was {outcome.name.lower()}."
        if operation is Operation.GET and outcome in (
            Outcome.CORRUPT, Outcome.SHORT, Outcome.LONG,
        ):  # fmt: skip
            return f"{said} The bytes are not those that were stored."
        return f"{said} See the log and `kvdock doctor`."

    def _step(self, operation: Operation, deadline_s: float) -> Outcome:
        if operation is Operation.GET and self.loaded is not None:
            self.loaded.rows[:] = 0
        batch = self._batch(operation, deadline_s)
        result = self.channel.call(self.handle, batch, use=self._use())
        outcome = Outcome(int(result.outcomes.max()))
        if operation is Operation.GET and outcome is Outcome.OK:
            outcome = self._compare(result)
        return outcome

    def _call(self, operation: Operation, deadline_s: float) -> BatchResult:
        # Directly, without the breaker: this is the thread of the probe.
        batch = self._batch(operation, deadline_s)
        result = self.channel.backend.batch_io(self.handle, batch)
        if result.hold is not None:
            self.channel.keep(result.hold, self._use())
        return result

    def _use(self) -> MemoryUse:
        """Return the use of the memory of a test page, which a backend may hold."""
        memory = self.loaded.staging if self.loaded is not None else None
        entered = memory is not None and memory.enter()
        return MemoryUse(memory.leave if memory is not None and entered else None)

    def _batch(self, operation: Operation, deadline_s: float) -> Batch:
        buffers = {Operation.PUT: self.stored, Operation.GET: self.loaded}
        area = buffers.get(operation)
        if area is None:
            nothing = np.zeros((len(self.keys), 0), np.int64)
            return Batch(operation, self.keys, nothing, nothing, deadline_s, self.pool)
        where = area.staging.region.addresses(area.numbers(1))
        return Batch(operation, self.keys, *where, deadline_s, self.pool)

    def _pattern(self, nbytes: int) -> bytes:
        # Different in every object, so that swapped ones are seen.
        seed = hashlib.sha256("".join(self.keys).encode()).digest()
        return (seed * (nbytes // len(seed) + 1))[:nbytes]

    def _fill(self, area: StagingBuffer) -> None:
        staging = area.staging
        for at, nbytes in enumerate(staging.payload):
            pattern = np.frombuffer(self._pattern(nbytes + at), np.uint8)[at:]
            area.payload(at, 1)[0, :] = pattern
        if staging.trailers is not None:
            staging.trailers.write(self.keys, area.numbers(1))

    def _compare(self, result: BatchResult) -> Outcome:
        area = self.loaded
        if area is None:
            return Outcome.OK
        staging = area.staging
        if staging.trailers is not None:
            where = area.numbers(1)
            codes = staging.trailers.verify(self.keys, where, result.outcomes)
            if codes.any():
                return Outcome(int(codes.max()))
        for at, nbytes in enumerate(staging.payload):
            pattern = self._pattern(nbytes + at)[at:]
            if area.payload(at, 1).tobytes() != pattern:
                return Outcome.CORRUPT
        return Outcome.OK
