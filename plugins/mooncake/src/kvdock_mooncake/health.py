"""Record what fails, for the log, and detect a store that is stuck."""

from __future__ import annotations

import logging
import time

import attrs
import numpy as np

from kvdock import Operation
from kvdock.arrays import Int64Array
from kvdock_mooncake.error_codes import (
    GIVEN_UP,
    LEASED,
    NO_ROOM,
    NOT_FOUND,
    NOT_READY,
    TRANSFER_FAILED,
    sentence_of,
)

log = logging.getLogger("kvdock")

_COMPLAIN_EVERY_S = 30.0
_STUCK_TTLS = 3.0
"""How long every transfer must have failed before a store counts as stuck.

A dead peer's objects are gone after one client_ttl of the master, so what
still fails after three of them is this store itself.
"""
_STUCK_LEAST_S = 30.0

_TRANSFERS = (Operation.GET, Operation.PUT)
"""What moves bytes: the master answers all else, also for a wedged store."""

_EXPECTED = frozenset({NOT_FOUND, NOT_READY, NO_ROOM, LEASED})


@attrs.define(eq=False)
class Health:
    """The record of one client's calls.

    Args:
        replaceable: Whether a stuck store may be replaced by a new one.
        client_ttl_s: How long the master waits for a lost process.
    """

    replaceable: bool
    client_ttl_s: float = 10.0
    is_stuck: bool = attrs.field(default=False, init=False)
    _failing_since: dict[Operation, float] = attrs.field(factory=dict, init=False)
    _patience_s: float = attrs.field(init=False)
    _complaints: dict[int, float] = attrs.field(factory=dict, init=False)

    @_patience_s.default
    def _stuck_s(self) -> float:
        return max(_STUCK_LEAST_S, _STUCK_TTLS * self.client_ttl_s)

    def record(self, operation: Operation, numbers: Int64Array) -> None:
        """Log what failed, each reason at most twice a minute.

        Args:
            operation: What was done.
            numbers: int64 (n,), the library's number for each key.
        """
        failed = numbers < 0
        if not failed.any():
            self.record_success(operation)
            return
        now = time.monotonic()
        if operation in _TRANSFERS:
            self._record_transfer(operation, numbers, now)
        for number in np.unique(numbers[failed]).tolist():
            if number in _EXPECTED or now < self._complaints.get(number, 0.0):
                continue
            self._complaints[number] = now + _COMPLAIN_EVERY_S
            log.warning(
                "mooncake: %s of %d keys of %d failed: %s",
                operation,
                int((numbers == number).sum()),
                len(numbers),
                sentence_of(number),
            )

    def _record_transfer(
        self, operation: Operation, numbers: Int64Array, now: float
    ) -> None:
        moved = numbers > 0 if operation is Operation.GET else numbers == 0
        if moved.any():
            self.record_success(operation)
        elif np.isin(numbers, (TRANSFER_FAILED, GIVEN_UP)).any():
            since = self._failing_since.setdefault(operation, now)
            self.is_stuck = self.replaceable and now - since > self._patience_s

    def record_success(self, operation: Operation) -> None:
        """Note that a call went well, for every key or for some."""
        if operation is Operation.GET:
            self._failing_since.clear()
            self._patience_s = self._stuck_s()
        elif operation is Operation.PUT:
            # A put of what is there already moves nothing and goes well.
            self._failing_since.pop(operation, None)
        # One that hangs for long may have kept it from being replaced until now.
        self.is_stuck = self.is_stuck and bool(self._failing_since)

    def reset(self) -> None:
        """Start over with another store."""
        self.is_stuck = False
        self._failing_since.clear()
        # Where a new store did not help, the next one has to wait longer.
        self._patience_s *= 2
