"""Bounce buffers are kept, bounded and waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvdock_nixl.bounce_buffers import LEAST_BYTES, BounceBuffers

FOREVER_S = time.monotonic() + 3600


class Known:
    """Registered memory, by address."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        self.ranges[address] = nbytes
        return lambda: self.ranges.__delitem__(address)


def test_a_buffer_is_registered_once_and_lent_again() -> None:
    known = Known()
    buffers = BounceBuffers(known.register)
    seen = set()
    for nbytes in (1, 4096, LEAST_BYTES):
        with buffers.borrow(nbytes, FOREVER_S) as one:
            assert one is not None
            assert one.address % 4096 == 0
            assert one.nbytes >= nbytes
            seen.add(one.address)
    assert set(known.ranges) == seen
    assert len(seen) == 1
    buffers.close()
    assert not known.ranges


def test_buffers_are_bounded_and_a_call_waits_for_one() -> None:
    known = Known()
    buffers = BounceBuffers(known.register, most_bytes=2 * LEAST_BYTES)
    waiting = threading.Event()

    def third() -> bool:
        waiting.set()
        with buffers.borrow(LEAST_BYTES, FOREVER_S) as one:
            return one is not None

    with ThreadPoolExecutor(1) as thread:
        with buffers.borrow(1, FOREVER_S), buffers.borrow(1, FOREVER_S):
            with buffers.borrow(1, time.monotonic()) as late:
                assert late is None
            found = thread.submit(third)
            assert waiting.wait(60)
            assert not found.done()
        assert found.result(60)
    assert sum(known.ranges.values()) <= 2 * LEAST_BYTES


def test_a_larger_object_than_all_buffers_together_gets_one_alone() -> None:
    known = Known()
    buffers = BounceBuffers(known.register, most_bytes=2 * LEAST_BYTES)
    with buffers.borrow(1, FOREVER_S):
        pass
    with buffers.borrow(5 * LEAST_BYTES, FOREVER_S) as one:
        assert one is not None
        assert one.nbytes >= 5 * LEAST_BYTES
        assert len(known.ranges) == 1  # the idle one made room
        with buffers.borrow(1, time.monotonic()) as late:
            assert late is None
