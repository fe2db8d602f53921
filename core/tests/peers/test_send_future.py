from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from kvdock.batch import Outcome
from kvdock.peers.messages import Epoch, Ticket
from kvdock.peers.send_future import RunningSend

if TYPE_CHECKING:
    from kvdock.transfer.leases import Lease


def ticket() -> Ticket:
    return Ticket(
        request="r",
        number=0,
        sender=0,
        claim="c",
        epoch=Epoch("p", 0),
        duration_s=60.0,
        digests=False,
        pools={},
    )


def test_a_send_is_quiet_only_once_its_pages_are_free() -> None:
    future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
    seen: list[bool] = []

    class Watching:
        def end(self) -> None:
            seen.append(future.quiet)

    future.hold(cast("Lease", Watching()))
    assert future.start()
    future.finish(np.array([Outcome.OK], np.uint8))
    assert seen == [False]
    assert future.wait_quiet(0)


def test_the_outcomes_of_a_send_are_not_seen_before_it_is_quiet() -> None:
    """What `wait` is followed by is a completion, and it says what is over."""
    future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
    seen: list[bool] = []

    class Watching:
        def end(self) -> None:
            seen.append(future.ended or future.wait(0))

    future.hold(cast("Lease", Watching()))
    assert future.start()
    future.finish(np.array([Outcome.OK], np.uint8))
    assert seen == [False]
    assert future.completion().ended


@pytest.mark.parametrize("first", ["run", "call"])
def test_a_call_that_goes_on_is_not_over_with_the_outcomes(first: str) -> None:
    future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
    assert future.start()
    future.enter()
    outcomes = np.array([Outcome.TIMEOUT], np.uint8)
    if first == "run":
        future.finish(outcomes)
        assert future.wait(0)
        assert not future.completion().ended
        future.leave()
    else:
        future.leave()
        assert not future.ended
        future.finish(outcomes)
    assert future.completion().ended


def test_many_reject_a_future_at_once() -> None:
    for _ in range(50):
        future = RunningSend(ticket(), ("kv",), time.monotonic() + 60)
        start = threading.Barrier(4)

        def reject(future: RunningSend = future, start: Any = start) -> None:
            start.wait()
            future.reject(Outcome.REFUSED)

        threads = [threading.Thread(target=reject) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert future.quiet
        assert future.completion().ended
