"""One page per pool of the core's own, to find out whether a backend works.

The self test stores, finds, loads, compares and drops it when memory is
attached; a breaker asks for it before it lets an engine's call through. Both
go the real way: the pool's keys, its pieces of memory, its trailers.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batches import Batch, BatchResult, Operation, Outcome
from kvdock.hookspecs import Finding
from kvdock.keys import build_keys

if TYPE_CHECKING:
    from kvdock.sessions.line import Line
    from kvdock.sessions.staging import Area, Staging


@attrs.frozen(eq=False)
class Probe:
    """The test page of one pool.

    Args:
        pool: The pool's name.
        line: The way to its backend.
        handle: What the backend gave for it.
        keys: The keys of the page's objects, of no page of an engine.
        staging: Two areas of one page, or None for a pool without bytes.
    """

    pool: str
    line: Line
    handle: object = attrs.field(repr=False)
    keys: tuple[str, ...]
    staging: Staging | None = attrs.field(repr=False)

    @classmethod
    def of(
        cls,
        line: Line,
        handle: object,
        keys: tuple[str, str, tuple[str, ...]],
        staging: Staging | None,
    ) -> Probe:
        """Make a page of its own: `keys` are pool, namespace and suffixes."""
        pool, namespace, suffixes = keys
        # No two processes share a test page, so none sees another's deleted.
        mine = hashlib.sha256(os.urandom(16)).hexdigest()
        names = build_keys(namespace, [mine], suffixes)
        return cls(pool, line, handle, tuple(names), staging)

    def run(self, operation: Operation, deadline_s: float) -> BatchResult:
        """Make one harmless call of a kind, past the breaker.

        A call that stores cleans up after itself.
        """
        if self.staging is None or operation not in (Operation.PUT, Operation.GET):
            return self._call(Operation.EXISTS, deadline_s)
        area = self.staging.take(deadline_s)
        if area is None:
            # The last probe still hangs, and has the memory.
            batch = Batch(Operation.EXISTS, self.keys)
            return BatchResult.all(batch, Outcome.TIMEOUT)
        try:
            if operation is Operation.PUT:
                self._fill(area)
            result = self._call(operation, deadline_s, area)
            if operation is Operation.PUT:
                self._call(Operation.DELETE, deadline_s)
            return result
        finally:
            area.give_back()

    def self_test(self, timeout_s: float) -> tuple[Finding, ...]:
        """Store, find, load, compare and drop the page; what failed is told."""
        steps = (
            ("stored", Operation.PUT),
            ("found", Operation.EXISTS),
            ("read back", Operation.GET),
            ("dropped", Operation.DELETE),
        )
        findings = []
        for done, operation in steps:
            outcome = self._step(operation, time.monotonic() + timeout_s)
            ok = outcome is Outcome.OK
            what = f"pool {self.pool}: a page was {'' if ok else 'not '}{done}"
            hint = "" if ok else self._hint(operation, outcome)
            findings.append(Finding(ok, f"{what} by {self.line.name}", hint))
            if not ok and operation is Operation.PUT:
                break
        return tuple(findings)

    def _hint(self, operation: Operation, outcome: Outcome) -> str:
        said = f"The outcome was {outcome.name.lower()}."
        if operation is Operation.GET and outcome in (
            Outcome.CORRUPT, Outcome.SHORT, Outcome.LONG,
        ):  # fmt: skip
            return f"{said} The bytes are not those that were stored."
        return f"{said} See the log and `kvdock doctor`."

    def _step(self, operation: Operation, deadline_s: float) -> Outcome:
        area = None
        if self.staging is not None and operation in (Operation.PUT, Operation.GET):
            area = self.staging.take(deadline_s)
            if area is None:
                return Outcome.TIMEOUT
            if operation is Operation.PUT:
                self._fill(area)
            else:
                area.rows[:] = 0
        batch = self._batch(operation, deadline_s, area)
        late = area.give_back if area is not None else None
        answer = self.line.run(self.handle, batch, late)
        outcome = Outcome(int(answer.result.outcomes.max()))
        if area is not None and not answer.late:
            if operation is Operation.GET and outcome is Outcome.OK:
                outcome = self._compare(area, answer.result)
            area.give_back()
        return outcome

    def _call(
        self, operation: Operation, deadline_s: float, area: Area | None = None
    ) -> BatchResult:
        batch = self._batch(operation, deadline_s, area)
        return self.line.call_probe(self.handle, batch)

    def _batch(
        self, operation: Operation, deadline_s: float, area: Area | None
    ) -> Batch:
        if self.staging is None or area is None:
            nothing = np.zeros((len(self.keys), 0), np.int64)
            return Batch(operation, self.keys, nothing, nothing, deadline_s, self.pool)
        where = self.staging.region.addresses(area.numbers(1))
        return Batch(operation, self.keys, *where, deadline_s, self.pool)

    def _pattern(self, nbytes: int) -> bytes:
        # Different in every object, so that swapped ones are seen.
        seed = hashlib.sha256("".join(self.keys).encode()).digest()
        return (seed * (nbytes // len(seed) + 1))[:nbytes]

    def _fill(self, area: Area) -> None:
        staging = area.staging
        for at, nbytes in enumerate(staging.payload):
            pattern = np.frombuffer(self._pattern(nbytes + at), np.uint8)[at:]
            area.payload(at, 1)[0, :] = pattern
        staging.seal(area, self.keys, 1)

    def _compare(self, area: Area, result: BatchResult) -> Outcome:
        staging = area.staging
        codes = staging.check(area, self.keys, result.outcomes)
        if codes.any():
            return Outcome(int(codes.max()))
        for at, nbytes in enumerate(staging.payload):
            pattern = self._pattern(nbytes + at)[at:]
            if area.payload(at, 1).tobytes() != pattern:
                return Outcome.CORRUPT
        return Outcome.OK
