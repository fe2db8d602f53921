"""Sum one part of a request while NIXL moves another."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

from kvdock.segments import IORequest, IOResult, checksums

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array


@attrs.define(eq=False)
class PendingSums:
    """Parts of one request that wait for their checksums.

    Args:
        request: The objects.
        result: Takes their checksums.
        helper: Sums parts on its thread, between other requests' parts.
    """

    request: IORequest
    result: IOResult
    helper: ThreadPoolExecutor
    _todo: deque[Int64Array] = attrs.field(factory=deque, init=False)
    _helping: list[Future[bool]] = attrs.field(factory=list, init=False)

    def add(self, rows: Int64Array) -> None:
        """Have the helper sum some objects, unless `finish` is faster.

        Args:
            rows: int64 (n,), positions in the request.
        """
        self._todo.append(rows)
        with suppress(RuntimeError):  # no thread can be started: all is summed here
            self._helping.append(self.helper.submit(self._next))

    def finish(self, *more: Int64Array) -> None:
        """Sum on this thread what the helper has not begun, and wait for the rest.

        Args:
            more: Further objects, as for `add`.
        """
        self._todo.extend(more)
        try:
            while self._next():
                pass
        finally:
            # One that begins late must not find the caller's memory.
            self._todo.clear()
            wait([future for future in self._helping if not future.cancel()])
        for future in self._helping:
            if not future.cancelled():
                future.result()

    def _next(self) -> bool:
        """Sum the part that has waited longest; return whether there was one."""
        try:
            rows = self._todo.popleft()
        except IndexError:
            return False
        request = self.request
        self.result.checksums[rows] = checksums(
            request.addresses[rows], request.sizes[rows]
        )
        return True
