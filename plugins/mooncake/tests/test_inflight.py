"""Pieces under way, over several threads."""

from __future__ import annotations

import threading
import time

from kvdock_mooncake.inflight import InFlightLimit


def test_threads_together_stay_below_the_bound() -> None:
    allowance = InFlightLimit(10)
    under_way, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal under_way, most
        for _ in range(200):
            assert allowance.enter(4, time.monotonic() + 30)
            with lock:
                under_way += 4
                most = max(most, under_way)
            with lock:
                under_way -= 4
            allowance.leave(4)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 4 <= most <= 10
    assert allowance._taken == 0


def test_a_call_with_more_pieces_than_the_bound_goes_alone() -> None:
    allowance = InFlightLimit(10)
    assert allowance.enter(100, time.monotonic() + 1)
    assert not allowance.enter(1, time.monotonic() - 1)
    allowance.leave(100)
    assert allowance.enter(1, time.monotonic() + 1)


def test_no_deadline_at_all_is_no_overflow() -> None:
    allowance = InFlightLimit(1)
    assert allowance.enter(1, 0.0)
    threading.Timer(0.01, allowance.leave, [1]).start()
    assert allowance.enter(1, float("inf"))
